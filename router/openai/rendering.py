"""From a request to token ids and sampling: the chat template and the tokeniser each run once per prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.chat_template import ChatTemplate
from router.openai.schemas import ChatRequest, CompletionRequest, Generation
from router.registry import Limits
from router.tokenizer import Tokenizer
from transport.errors import ContextLengthExceeded, InvalidRequest
from transport.messages import Sampling


@dataclass(frozen=True, slots=True)
class Rendered:
    """One prompt. `text` only where it must be echoed."""

    token_ids: list[int]
    text: str = ""


class Renderer:
    """`limits` tells what the workers that are up can take; `defaults` are the model's own sampling defaults."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        vocab_size: int,
        limits: Callable[[], Limits],
        defaults: dict[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._limits = limits
        self._defaults = defaults

    async def chat(self, request: ChatRequest) -> list[Rendered]:
        """The one prompt of a chat. Raises InvalidRequest where the template refuses the messages."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        messages = []
        for message in request.messages:
            role = "system" if message.role == "developer" else message.role
            named = {"name": message.name} if message.name is not None else {}
            messages.append({"role": role, "content": message.text, **named})
        text = self._template.render(messages)
        return [Rendered(await self._encode(text, add_special_tokens=False))]

    async def completion(self, request: CompletionRequest, max_prompts: int) -> list[Rendered]:
        """All prompts of a text completion, in order. Raises InvalidRequest."""
        prompts = _prompts(request.prompt)
        if len(prompts) > max_prompts:
            raise InvalidRequest(f"prompt: at most {max_prompts} prompts at once, got {len(prompts)}", param="prompt")
        rendered = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = await self._encode(prompt, add_special_tokens=request.add_special_tokens)
                rendered.append(Rendered(ids, prompt))
            else:
                if max(prompt) >= self._vocab_size:
                    raise InvalidRequest(
                        f"prompt: token ids must be below {self._vocab_size}, got {max(prompt)}", param="prompt"
                    )
                rendered.append(Rendered(prompt, self._tokenizer.decode(prompt) if request.echo else ""))
        return rendered

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises ContextLengthExceeded, before seconds go into tokenising it, for what cannot fit by its length."""
        context, longest = self._limits().context, self._tokenizer.longest_token
        if longest is not None and len(text) > context * longest:
            raise ContextLengthExceeded(
                f"the model's context is {context} tokens; {len(text)} characters of the prompt do not fit",
                param="prompt",
            )
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def max_tokens(self, prompt: Rendered, asked: int | None) -> int:
        """Tokens to generate; without a wish, all that fits. Raises InvalidRequest, ContextLengthExceeded."""
        limits, length = self._limits(), len(prompt.token_ids)
        if length == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        room = limits.context - length
        if room < 1 or (asked is not None and asked > room):
            wish = "" if asked is None else f" and {asked} of the answer"
            raise ContextLengthExceeded(
                f"the model's context is {limits.context} tokens; {length} of the prompt{wish} do not fit",
                param="prompt" if room < 1 else "max_tokens",
            )
        if asked == 1 or limits.pool_tokens is None:
            return asked or room
        if length + (asked or 1) > limits.pool_tokens:
            raise ContextLengthExceeded(
                f"no decode worker can hold {length} tokens of the prompt and {asked or 1} of the answer; "
                f"the largest holds {limits.pool_tokens}",
                param="max_tokens",
            )
        return asked or min(room, limits.pool_tokens - length)

    def sampling(self, request: Generation, max_tokens: int, index: int, logprobs: int | None) -> Sampling:
        """Sampling of choice `index` of a prompt: with a seed, each choice has its own."""
        if any(token_id >= self._vocab_size for token_id in request.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids: must be below {self._vocab_size}", param="stop_token_ids")
        chosen = {**self._defaults}
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = getattr(request, name)
            if value is not None:
                chosen[name] = value
        if chosen.get("top_k") == -1:
            chosen["top_k"] = 0
        return Sampling(
            max_tokens=max_tokens,
            seed=None if request.seed is None else (request.seed + index) % 2**63,
            logprobs=logprobs,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            **chosen,
        )


def sampling_defaults(model_dir: Path) -> dict[str, Any]:
    """What the model's authors recommend in generation_config.json, as vLLM applies it too."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    names = ("temperature", "top_p", "top_k", "min_p")
    return {name: config[name] for name in names if config.get(name) is not None}


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The four forms of `prompt` as one."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_token_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt) or all(_is_token_ids(item) for item in prompt):
            return prompt
    raise InvalidRequest(
        "prompt: must be a string, a list of strings, a list of token ids, or a list of such lists (none empty)",
        param="prompt",
    )


def _is_token_ids(items: Any) -> bool:
    return isinstance(items, list) and bool(items) and all(type(item) is int and 0 <= item < 2**31 for item in items)
