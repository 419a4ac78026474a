"""The JSON of answers: one shape for chat, one for text completions, each whole and as stream chunks."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any, Protocol

from router.openai.choice import Choice, TokenLogprob
from router.openai.logprobs import chat_logprobs, completion_logprobs
from router.tokenizer import Tokenizer
from transport.messages import FinishReason


class Shape(Protocol):
    """`text_chunk` is the hot path of streaming: everything but the text is prepared."""

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]: ...

    def first_chunk(self, index: int) -> bytes:
        """What opens a choice in a stream."""

    def text_chunk(self, index: int, text: str) -> bytes: ...

    def chunk(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None
    ) -> bytes: ...

    def usage_chunk(self, usage: dict[str, Any]) -> bytes: ...


class _Base:
    """`usage_field`: with include_usage every chunk says `"usage": null`, and a last one has it."""

    object = ""
    chunk_object = ""

    def __init__(self, id: str, created: int, model: str, tokenizer: Tokenizer, *, usage_field: bool) -> None:
        self._head = {"id": id, "object": self.object, "created": created, "model": model}
        self._chunk_head = {"id": id, "object": self.chunk_object, "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if usage_field else {}
        self._tokenizer = tokenizer
        self._templates: dict[int, tuple[str, str]] = {}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return sse({**self._chunk_head, "choices": [choice], **self._tail})

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def text_chunk(self, index: int, text: str) -> bytes:
        template = self._templates.get(index)
        if template is None:
            before, after = self._event(self._text_choice(index, "\0")).decode().split(r'"\u0000"')
            template = self._templates[index] = (before, after)
        return f"{template[0]}{encode_basestring(text)}{template[1]}".encode("utf-8", "replace")

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse({**self._chunk_head, "choices": [], "usage": usage})


class ChatShape(_Base):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _logprobs(self, positions: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if positions is None else chat_logprobs(self._tokenizer, positions)

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def first_chunk(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def chunk(self, index: int, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> bytes:
        delta = {"content": text} if text or logprobs else {}
        return self._event(
            {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": finish}
        )

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.logprobs) if choice.want_logprobs else None,
                    "finish_reason": choice.finish,
                }
                for choice in choices
            ],
            "usage": usage,
        }


class CompletionShape(_Base):
    """`echo`: text of the prompt by choice index, shown before the choice's own."""

    object = chunk_object = "text_completion"

    def __init__(
        self, id: str, created: int, model: str, tokenizer: Tokenizer, *, usage_field: bool, echo: list[str] | None
    ) -> None:
        super().__init__(id, created, model, tokenizer, usage_field=usage_field)
        self._echo = echo

    def _logprobs(self, positions: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if positions is None else completion_logprobs(self._tokenizer, positions)

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def first_chunk(self, index: int) -> bytes:
        return b"" if self._echo is None else self.text_chunk(index, self._echo[index])

    def chunk(self, index: int, text: str, logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> bytes:
        return self._event(
            {"index": index, "text": text, "logprobs": self._logprobs(logprobs), "finish_reason": finish}
        )

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "text": (self._echo[choice.index] if self._echo else "") + choice.text,
                    "logprobs": self._logprobs(choice.logprobs) if choice.want_logprobs else None,
                    "finish_reason": choice.finish,
                }
                for choice in choices
            ],
            "usage": usage,
        }


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
