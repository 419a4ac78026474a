"""Next tokens out of logits: greedy or random, filtered as vLLM filters, reproducible by seed.

Order: temperature, min_p, top_k, top_p, draw. Every row is sampled on its own, and its random number is a
function of (seed, position) alone, so that a request's tokens do not depend on the batch it runs in.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decode_worker.engines.base import Scores
from transport.messages import Logprob, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM."""

NO_TOKEN = -1
"""What `sample` gives for a row whose logits have no finite maximum: there is nothing to choose from."""

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


@dataclass(slots=True)
class SamplingParams:
    """What the sampler needs of one request."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def of(cls, sampling: Sampling) -> SamplingParams:
        """A request without a seed gets a random one."""
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, seed, sampling.logprobs)


def choose(
    scores: Scores, rows: Sequence[SamplingParams], positions: npt.NDArray[np.int32]
) -> tuple[list[int], list[Logprob | None]]:
    """`sample` for a step's result: where every row can do with the most likely tokens, no more leaves the device."""
    count = max(map(_needed, rows))
    if 0 < count <= scores.max_top and all(map(_needed, rows)):
        tokens = _sample_top(*scores.top(count), rows, positions)
        if tokens is not None:
            return tokens, [None] * len(rows)
    return sample(scores.logits(), rows, positions)


def sample(
    logits: Floats, rows: Sequence[SamplingParams], positions: npt.NDArray[np.int32]
) -> tuple[list[int], list[Logprob | None]]:
    """One token per row of float32 logits [B, V], and its log-probabilities where the row asks for them.

    `positions[i]` is the position of the last token in the cache; ties go to the lowest id. `NO_TOKEN` for a
    row without a finite maximum: the other rows are none the worse for it.
    """
    tokens = logits.argmax(axis=1).tolist()
    best = logits[np.arange(len(tokens)), tokens]
    logprobs: list[Logprob | None] = [None] * len(tokens)
    for i, row in enumerate(rows):
        if not math.isfinite(best[i]):
            tokens[i] = NO_TOKEN
            continue
        if not row.greedy:
            tokens[i] = _draw(logits[i], float(best[i]), row, int(positions[i]))
        if row.logprobs is not None:
            logprobs[i] = _logprob(logits[i], tokens[i], row.logprobs)
    return tokens, logprobs


def _needed(row: SamplingParams) -> int:
    """How many of the most likely tokens decide this row's next one; 0 for all. One more than top_k shows ties."""
    if row.logprobs is not None:
        return 0
    if row.greedy:
        return 1
    return row.top_k + 1 if row.top_k > 0 else 0


def _sample_top(
    ids: npt.NDArray[np.int32], values: Floats, rows: Sequence[SamplingParams], positions: npt.NDArray[np.int32]
) -> list[int] | None:
    """`sample` from the most likely tokens, best first; None if a token behind them ties with a row's last."""
    tokens: list[int] = []
    for i, row in enumerate(rows):
        best = float(values[i, 0])
        if not math.isfinite(best):
            tokens.append(NO_TOKEN)
        elif row.greedy:
            tokens.append(int(ids[i, 0]))
        else:
            if values[i, row.top_k] == values[i, row.top_k - 1]:
                return None
            order = np.argsort(ids[i, : row.top_k])  # the order in which `sample` adds probabilities up
            drawn = _draw(values[i, order], best, row, int(positions[i]))
            tokens.append(int(ids[i, order[drawn]]))
    return tokens


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) that decides the token after `position`."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, position])).random())


def kept(logits: Floats, row: SamplingParams) -> Ids:
    """Token ids, ascending, that min_p, top_k and top_p leave of one row of (raw) logits [V]."""
    scaled = logits / np.float32(row.temperature)
    ids = _filter(scaled, float(scaled.max()), row)
    return np.arange(len(logits)) if ids is None else ids


def _draw(logits: Floats, best: float, row: SamplingParams, position: int) -> int:
    scaled = (logits - np.float32(best)) / np.float32(row.temperature)
    ids = _filter(scaled, 0.0, row)
    cumulative = np.cumsum(np.exp(scaled if ids is None else scaled[ids]), dtype=np.float64)
    chosen = int(np.searchsorted(cumulative, uniform(row.seed, position) * cumulative[-1], side="right"))
    chosen = min(chosen, len(cumulative) - 1)
    return chosen if ids is None else int(ids[chosen])


def _filter(scaled: Floats, best: float, row: SamplingParams) -> Ids | None:
    """Token ids, ascending, that survive; None if no filter is on."""
    ids: Ids | None = None
    if row.min_p > 0:
        ids = np.flatnonzero(scaled >= best + math.log(row.min_p))
        scaled = scaled[ids]
    if 0 < row.top_k < len(scaled):
        kth = np.partition(scaled, len(scaled) - row.top_k)[len(scaled) - row.top_k]
        top = np.flatnonzero(scaled >= kth)  # ties with the k-th stay, as in vLLM
        ids = top if ids is None else ids[top]
        scaled = scaled[top]
    if row.top_p < 1:
        nucleus = _nucleus(scaled, best, row.top_p)
        ids = nucleus if ids is None else ids[nucleus]
    return ids


def _nucleus(scaled: Floats, best: float, top_p: float) -> Ids:
    """Indices, ascending, of the fewest most likely entries whose probabilities reach `top_p`."""
    weights = np.exp(scaled - np.float32(best))
    descending = np.sort(weights)[::-1]
    cumulative = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1, len(weights))
    least = descending[count - 1]
    inside = np.flatnonzero(weights >= least)
    if (surplus := len(inside) - count) > 0:  # of equals, the lowest ids stay
        inside = np.delete(inside, np.flatnonzero(weights[inside] == least)[-surplus:])
    return inside


def _logprob(logits: Floats, token: int, top: int) -> Logprob:
    """Log-softmax of the raw logits (before temperature and filters), as vLLM reports by default."""
    best = logits.max()
    normaliser = float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))
    alternatives: tuple[tuple[int, float], ...] = ()
    if top:
        count = min(top, len(logits))
        part = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
        order = part[np.lexsort((part, -logits[part]))]
        alternatives = tuple((int(t), float(logits[t]) - normaliser) for t in order)
    return Logprob.model_construct(token=token, logprob=float(logits[token]) - normaliser, top=alternatives)
