"""The prompts of the end-to-end tests: deterministic English, cut to exact token counts around block and tile edges."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

#: every length class the transfer cares about: tiny, k·32 and k·128 with their neighbours, and in between
LENGTHS = (
    *(1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 47, 63, 64, 65, 80, 95, 96, 97, 110, 127, 128, 129, 150, 159, 160, 161),
    *(191, 192, 193, 224, 255, 256, 257, 288, 319, 321, 383, 384, 385, 416, 447, 449, 480, 511, 512, 513, 577, 600),
)

CHATS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "How many legs does a spider have? Answer with a number and explain in one sentence.",
)

SUBJECTS = (
    "The old captain",
    "A young painter",
    "Our neighbour",
    "The village doctor",
    "My grandmother",
    "The teacher",
)
VERBS = ("carried", "found", "repaired", "described", "borrowed", "painted", "lost", "remembered")
OBJECTS = (
    "a wooden boat",
    "the broken clock",
    "an ancient map",
    "two silver coins",
    "the garden gate",
    "a red lantern",
)
PLACES = (
    "near the harbour",
    "behind the church",
    "in the valley",
    "on the northern road",
    "at the market",
    "by the river",
)
TIMES = ("in early spring", "before the storm", "after the long winter", "one quiet morning", "late that evening")


def story(seed: int, sentences: int) -> str:
    """English text of `sentences` sentences, the same for the same seed."""
    rng = random.Random(seed)
    return " ".join(
        f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} "
        f"{rng.choice(PLACES)} {rng.choice(TIMES)}{rng.choice('.!;')}"
        for _ in range(sentences)
    )


@dataclass(frozen=True)
class Prompt:
    """One prompt: token ids for `/v1/completions`, or a user message for `/v1/chat/completions`."""

    name: str
    token_ids: tuple[int, ...] | None = None
    message: str | None = None

    @property
    def path(self) -> str:
        return "/v1/completions" if self.message is None else "/v1/chat/completions"

    def body(self, **fields: Any) -> dict[str, Any]:
        """Request body without the model, greedy unless `fields` says otherwise."""
        if self.message is None:
            return {"prompt": list(self.token_ids or ()), "temperature": 0, **fields}
        return {"messages": [{"role": "user", "content": self.message}], "temperature": 0, **fields}


class PromptBook:
    """Cuts prompts with the tokenizer of the model under test."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens(self, length: int, seed: int) -> tuple[int, ...]:
        """Exactly `length` token ids of a story; different seeds share no block."""
        ids = self.tokenizer.encode(f"Chapter {seed}. " + story(seed, length // 8 + 2), add_special_tokens=False).ids
        assert len(ids) >= length
        return tuple(ids[:length])

    @cached_property
    def reference(self) -> list[Prompt]:
        """The prompts whose greedy continuation the reference knows."""
        cut = [Prompt(f"tokens-{n}", token_ids=self.tokens(n, seed=n)) for n in LENGTHS]
        return cut + [Prompt(f"chat-{i}", message=text) for i, text in enumerate(CHATS)]

    def decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
