"""Incremental text against the library's own decoding, for byte-level and for other tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fleet import EOS, make_model
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from tokenizers.decoders import DecodeStream

from router.detokenizer import ByteLevelDetokenizer, StreamDetokenizer
from router.tokenizer import INLINE_CHARACTERS, Tokenizer
from transport.errors import ConfigurationError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.of_model(make_model(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As SentencePiece models decode: ▁ is a space, a leading one is dropped, unknown characters are bytes."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "▁a": 257, "b": 258, "▁": 259}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(fast)


@given(text=st.text(max_size=20))
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer._fast.encode(text).ids
    detokenizer = tokenizer.detokenizer([])
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    pieces = [detokenizer.step(token_id) for token_id in ids]
    assert "".join(pieces) == text.rstrip("\ufffd")
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, EOS), max_size=24), skip=st.booleans())
def test_any_bytes_equal_the_librarys_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """Step by step, on byte strings that are no text: what vLLM, which uses that stream, shows."""
    ours, theirs = tokenizer.detokenizer([], skip_special_tokens=skip), DecodeStream(skip_special_tokens=skip)
    for token_id in ids:
        assert ours.step(token_id) == (theirs.step(tokenizer._fast, token_id) or "")


def test_other_decoders_go_on_where_the_prompt_ends(byte_fallback: Tokenizer) -> None:
    """The space before a word is dropped at the start of a text, not in its middle."""
    detokenizer = byte_fallback.detokenizer([257, 258])
    assert isinstance(detokenizer, StreamDetokenizer)
    assert [detokenizer.step(token_id) for token_id in (257, 258)] == [" a", "b"]
    euro = [b + 1 for b in "€".encode()]
    assert [detokenizer.step(token_id) for token_id in euro] == ["", "", "€"]


def test_a_token_by_itself(tokenizer: Tokenizer) -> None:
    first = tokenizer._fast.encode("é").ids[0]
    assert tokenizer.token_text(first) == ("\ufffd", b"\xc3")
    assert tokenizer.token_text(EOS) == ("<eos>", b"<eos>")


async def test_long_texts_are_encoded_as_short_ones(tokenizer: Tokenizer) -> None:
    before = tokenizer.calls
    text = "ab" * INLINE_CHARACTERS
    assert await tokenizer.encode(text, add_special_tokens=False) == tokenizer._fast.encode(text).ids
    assert tokenizer.calls == before + 1


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json does not exist"):
        Tokenizer.of_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="not a usable tokenizer"):
        Tokenizer.of_model(tmp_path)
