"""Request bodies: types and ranges, strict (a string is no number, true is no integer)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from router.openai.fields import select
from transport.errors import InvalidRequest, UnsupportedParameter

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 65536

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False


class Generation(_Strict):
    """What both endpoints have in common. `top_k` 0 and -1 are off."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One chat message. `developer` is OpenAI's later name for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Generation):
    """`prompt`: text, texts, token ids, or lists of token ids (checked when it is rendered).

    Without `max_tokens` this endpoint generates 16 tokens, as OpenAI's and vLLM's do.
    """

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Any
    echo: bool = False
    add_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _no_logprobs_of_the_prompt(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise UnsupportedParameter("echo together with logprobs is not supported here", param="echo")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


R = TypeVar("R", bound=Generation)
_HONOURED: dict[type[Generation], frozenset[str]] = {
    cls: frozenset(cls.model_fields) for cls in (ChatRequest, CompletionRequest)
}


def parse(cls: type[R], body: Any) -> R:
    """Raises InvalidRequest (or UnsupportedParameter) that names the field."""
    fields = select(body, _HONOURED[cls])
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_message(i, message) for i, message in enumerate(fields["messages"])]
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def _message(index: int, message: Any) -> Any:
    """Nulls are absent. What the API knows and we do not is refused as unsupported, not as malformed."""
    if not isinstance(message, dict):
        return message
    message = {key: value for key, value in message.items() if value is not None}
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if name in message:
            raise UnsupportedParameter(f"messages.{index}.{name} is not supported here", param="messages")
    if message.get("role") in ("tool", "function"):
        raise UnsupportedParameter(
            f"messages.{index}: role {message['role']!r} is not supported here", param="messages"
        )
    parts = message.get("content")
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedParameter(
                f"messages.{index}.content: parts of type {kind[:64]!r} are not supported here", param="messages"
            )
    return message


def _explain(error: ValidationError) -> InvalidRequest:
    """The first error, in words, with the field's path; the alternatives of a union are joined."""
    errors = error.errors(include_url=False, include_input=False)
    loc = [str(part) for part in errors[0]["loc"]]
    param = loc[0] if loc else None
    path = ".".join(loc[: 3 if param == "messages" else 1])
    same = [item["msg"] for item in errors if [str(part) for part in item["loc"]][: len(loc[:1])] == loc[:1]]
    return InvalidRequest(f"{path}: {'; or '.join(list(dict.fromkeys(same))[:3])}", param=param)
