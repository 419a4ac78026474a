"""What the OpenAI side and the dispatcher share: one generation to run, and where its tokens go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from transport.messages import FinishReason, Logprob, Sampling


class Sink(Protocol):
    """Takes the tokens of one choice. Called in the event loop's thread, once per engine step: it must be cheap."""

    def tokens(self, token_ids: list[int], logprobs: list[Logprob] | None, finish: FinishReason | None) -> bool:
        """More tokens of the choice → whether it is over (`finish` was set, or a stop string matched)."""

    def restart(self) -> bool:
        """Forget all tokens because the generation starts anew → False when the client has seen some of them."""


@dataclass(slots=True)
class Job:
    """One prompt to continue once. `sampling.max_tokens` is final; `id` is unique in the fleet.

    `generated` holds the tokens given to the sink so far, `cached_tokens` what the first prefill found in P's
    prefix cache (None before there was one).
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    sink: Sink
    generated: list[int] = field(default_factory=list)
    cached_tokens: int | None = None

    @property
    def remaining(self) -> int:
        return self.sampling.max_tokens - len(self.generated)
