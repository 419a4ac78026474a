"""The model's tokenizer as the router uses it: text → ids (long ones off the event loop), ids → text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from router.detokenizer import ByteLevelDetokenizer, ByteTable, Detokenizer, StreamDetokenizer
from transport.errors import ConfigurationError

#: prompts up to this many characters are tokenised on the event loop: a thread would cost more than they do
INLINE_CHARACTERS = 2048


class Tokenizer:
    """`calls` counts the texts that were tokenised: one per prompt of a request, never more.

    `longest_token`: how many characters one token stands for at most; None for a tokenizer that may take in any
    number of them (by stripping or normalising).
    """

    def __init__(self, fast: FastTokenizer) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        parts = json.loads(fast.to_str())
        self._byte_level = parts["decoder"] is not None and parts["decoder"]["type"] == "ByteLevel"
        strips = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        self.longest_token: int | None = None
        if self._byte_level and parts["normalizer"] is None and not strips:
            self.longest_token = max(map(len, fast.get_vocab(with_added_tokens=True)))
        self._tables = {skip: ByteTable(fast, skip) for skip in (False, True)}
        self._texts: dict[int, tuple[str, bytes]] = {}
        self.calls = 0

    @classmethod
    def of_model(cls, model_dir: Path) -> Tokenizer:
        """Raises ConfigurationError where the directory has no usable `tokenizer.json`."""
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(f"{path} does not exist: the router needs the model's fast tokenizer")
        try:
            return cls(FastTokenizer.from_file(str(path)))
        except Exception as error:
            raise ConfigurationError(f"{path} is not a usable tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; long texts in a thread."""
        self.calls += 1
        if len(text) <= INLINE_CHARACTERS:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_without_gil, text, add_special_tokens)

    def _encode_without_gil(self, text: str, add_special_tokens: bool) -> list[int]:
        """As a batch, because only that releases the GIL: `encode` would stop the event loop from any thread."""
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh detokeniser for one choice that continues `prompt`."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._tables[skip_special_tokens])
        return StreamDetokenizer(self._fast, prompt, skip_special_tokens)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token by itself, as logprobs show it: its text (U+FFFD for half characters) and its bytes."""
        known = self._texts.get(token_id)
        if known is None:
            text = self._fast.decode([token_id], skip_special_tokens=False)
            data = self._tables[False][token_id] if self._byte_level else text.encode("utf-8")
            known = self._texts[token_id] = (text, data)
        return known
