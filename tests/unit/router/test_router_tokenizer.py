"""Tokenising: what it costs everyone else, and what is refused before it."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from router_fleet import Fleet
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from router.tokenizer import Tokenizer


async def test_a_long_prompt_does_not_stop_other_threads(model_dir: Path) -> None:
    """The event loop would miss its heartbeats, and every session with it."""
    tokenizer = Tokenizer.of_model(model_dir)
    beats: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.001):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    ids = await tokenizer.encode("hello " * 200_000, add_special_tokens=False)
    took = time.monotonic() - began
    done.set()
    thread.join()
    assert len(ids) == 1_200_000
    inside = [began, *(beat for beat in beats if began < beat < began + took), began + took]
    assert max(b - a for a, b in itertools.pairwise(inside)) < took / 2


async def test_both_ways_of_tokenising_agree(model_dir: Path) -> None:
    tokenizer = Tokenizer.of_model(model_dir)
    text = "a<eos>é\u4f60 \n" * 400
    for special in (False, True):
        parts = [await tokenizer.encode("a<eos>é\u4f60 \n", add_special_tokens=special) for _ in range(400)]
        assert await tokenizer.encode(text, add_special_tokens=special) == [i for part in parts for i in part]


async def test_what_cannot_fit_is_not_tokenised(fleet: Fleet) -> None:
    await fleet.start()
    tokenizer = fleet.router.tokenizer
    assert tokenizer.longest_token == len("<pad>")
    longest = 512 * len("<pad>")
    for ask in (fleet.complete, fleet.chat):
        response = await ask("a" * (longest + 1))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "characters" in response.json()["error"]["message"]
    text = "<eos>" * 500  # as long, but of few tokens
    assert len(text) > 512
    assert (await fleet.complete(text)).status_code == 200


@pytest.mark.parametrize("how", ["normalizer", "strip", "plain"])
def test_tokenizers_without_a_longest_token(how: str, model_dir: Path) -> None:
    fast = FastTokenizer.from_file(str(model_dir / "tokenizer.json"))
    if how == "normalizer":
        fast.normalizer = normalizers.Strip()
    elif how == "strip":
        fast.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    else:
        fast = FastTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert Tokenizer(fast).longest_token is None
