"""Incremental detokenisation of one choice: token ids in, text out, never half a character.

What ends in U+FFFD is held back until it is complete, and dropped if it never is, as vLLM does: the text
is byte-equal to the same model served by vLLM alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
#: prompt tokens that a general decoder is primed with: enough for it to see that text goes on
PRIMING_TOKENS = 8


class Detokenizer(Protocol):
    def step(self, token_id: int) -> str:
        """The text that `token_id` completes, often its own; empty while a character is incomplete."""


class ByteLevelDetokenizer:
    """For byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM, …): a table look-up per token."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._pending = b""

    def step(self, token_id: int) -> str:
        data = self._table[token_id]
        if self._pending:
            data = self._pending + data
        text = data.decode("utf-8", "replace")
        if text.endswith(REPLACEMENT):
            self._pending = data
            return ""
        self._pending = b""
        return text


class StreamDetokenizer:
    """For any other decoder (SentencePiece with byte fallback, WordPiece, …)."""

    __slots__ = ("_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(ids=list(prompt[-PRIMING_TOKENS:]), skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # a decoder whose output is not monotonic loses its place; the text goes on from here
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token_id) or ""


class ByteTable(dict[int, bytes]):
    """Token id → the bytes it stands for, filled as tokens occur. Unknown ids and skipped special tokens are empty."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = (
            {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
            if skip_special_tokens
            else set()
        )

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        data = b"" if token is None else token_bytes(token)
        self[token_id] = data
        return data


def token_bytes(token: str) -> bytes:
    """Bytes of a byte-level vocabulary entry; added tokens that are outside its alphabet stand for themselves."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
