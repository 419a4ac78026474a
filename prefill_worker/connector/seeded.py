"""Seeded sampling under chunked prefill on the CPU backend.

vLLM samples after every chunk of a prompt and winds the request's generator back where the sample is thrown away.
It does so by the generator's offset, which torch has for GPUs only: on a CPU the engine dies of the first seeded
prompt that takes more than one chunk.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class RewindableGenerator(torch.Generator):
    """A CPU generator for requests of one token: all that was drawn before that token is thrown away, so that
    winding back always means starting anew."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.manual_seed(self.initial_seed())


def install() -> None:
    """From now on the engine of this process gives each seeded request a `RewindableGenerator`. Idempotent."""
    original = CachedRequestState.__post_init__
    if getattr(original, "rewindable", False):
        return

    def post_init(self: CachedRequestState) -> None:
        original(self)
        if self.generator is not None and self.generator.device.type == "cpu":
            generator = RewindableGenerator()
            generator.manual_seed(self.generator.initial_seed())
            self.generator = generator

    post_init.rewindable = True  # type: ignore[attr-defined]
    CachedRequestState.__post_init__ = post_init
