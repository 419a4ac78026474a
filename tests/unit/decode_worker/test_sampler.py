"""The sampler against a plain reference that sorts everything, and its promises about seeds and batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.sampler import NO_TOKEN, SamplingParams, choose, kept, sample, uniform
from transport.messages import Sampling

V = 3000


def logits_of(seed: int, rows: int = 1, size: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, size)) * 3).astype(np.float32)


def draw(logits: np.ndarray, params: SamplingParams, positions: list[int] | None = None) -> list[int]:
    at = np.array(positions if positions is not None else range(len(logits)), np.int32)
    return sample(logits, [params] * len(logits), at)[0]


def reference_kept(logits: np.ndarray, row: SamplingParams) -> set[int]:
    """vLLM's order: temperature, min_p, top_k, top_p, each on what the one before left."""
    scaled = logits.astype(np.float64) / row.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    alive = probs >= row.min_p * probs.max()
    if row.top_k:
        values = np.sort(scaled[alive])[::-1]
        alive &= scaled >= values[min(row.top_k, len(values)) - 1]
    probs = np.where(alive, probs, 0) / probs[alive].sum()
    if row.top_p == 1:
        return set(np.flatnonzero(alive).tolist())
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    return {int(t) for t, mass in zip(order, before, strict=True) if mass < row.top_p and alive[t]}


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.2, 3),
    st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    st.one_of(st.just(0), st.integers(1, 2 * V)),
    st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)
def test_filters_agree_with_the_reference(seed, temperature, top_p, top_k, min_p) -> None:
    row = SamplingParams(temperature, top_p, top_k, min_p)
    logits = logits_of(seed)[0]
    got, want = set(kept(logits, row).tolist()), reference_kept(logits, row)
    # float32 and float64 may disagree about the one token on the edge
    assert len(got ^ want) <= 1
    assert int(logits.argmax()) in got


def test_top_p_over_a_flat_distribution_keeps_the_lowest_ids() -> None:
    flat = np.zeros(V, np.float32)
    assert kept(flat, SamplingParams(1.0, top_p=0.9)).tolist() == list(range(2700))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([[0, 5, 5, 1], [2, 2, 2, 2]], np.float32)
    assert draw(logits, SamplingParams()) == [1, 0]
    assert draw(logits, SamplingParams(temperature=1e-6)) == [1, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(0.7, top_k=1), SamplingParams(2.0, top_p=1e-6), SamplingParams(1.0, min_p=1.0)]
)
def test_filters_that_leave_one_token_are_greedy(params: SamplingParams) -> None:
    logits = logits_of(3, rows=20)
    assert draw(logits, params) == logits.argmax(axis=1).tolist()


def test_case_47_same_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    logits = logits_of(5, rows=6)
    params = [SamplingParams(1.0, top_p=0.9, seed=11), *(SamplingParams(0.5 * i, seed=i) for i in range(5))]
    positions = np.arange(6, dtype=np.int32) + 40
    together = sample(logits, params, positions)[0]
    alone = [sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])[0][0] for i in range(6)]
    backwards = sample(logits[::-1].copy(), params[::-1], positions[::-1].copy())[0][::-1]
    assert together == alone == backwards


def test_seed_and_position_both_matter() -> None:
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.tile(np.log(probs).astype(np.float32), (4000, 1))
    counts = np.bincount(draw(logits, SamplingParams(1.0, seed=1)), minlength=4) / 4000
    assert np.abs(counts - probs).max() < 0.03


def test_temperature_sharpens() -> None:
    logits = np.tile(np.array([1.0, 0.0], np.float32), (2000, 1))
    cold = np.mean(draw(logits, SamplingParams(0.5, seed=2)))
    hot = np.mean(draw(logits, SamplingParams(5.0, seed=2)))
    assert cold == pytest.approx(1 / (1 + np.e**2), abs=0.03)
    assert hot == pytest.approx(1 / (1 + np.e**0.2), abs=0.04)


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    seeds = {SamplingParams.of(Sampling(max_tokens=1)).seed for _ in range(5)}
    assert len(seeds) == 5
    assert SamplingParams.of(Sampling(max_tokens=1, seed=4)).seed == 4


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(8, rows=3)
    params = [
        SamplingParams(2.0, top_k=5, seed=3, logprobs=4),
        SamplingParams(logprobs=0),
        SamplingParams(),
    ]
    tokens, entries = sample(logits, params, np.zeros(3, np.int32))
    raw = logits.astype(np.float64)
    raw -= np.log(np.exp(raw).sum(axis=1, keepdims=True))
    assert entries[2] is None
    for i in range(2):
        assert entries[i].token == tokens[i]
        assert entries[i].logprob == pytest.approx(raw[i, tokens[i]], abs=1e-4)
    order = np.argsort(-raw[0])[:4]
    assert [t for t, _ in entries[0].top] == order.tolist()
    assert [p for _, p in entries[0].top] == pytest.approx(raw[0, order].tolist(), abs=1e-4)
    assert entries[1].top == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gets_no_token_and_harms_no_other(bad: float, temperature: float) -> None:
    logits, positions = logits_of(1, rows=3), np.array([3, 9, 4], np.int32)
    rows = [SamplingParams(temperature, seed=1, logprobs=1)] * 3
    well, _ = sample(logits, rows, positions)
    logits[1, 7] = bad
    tokens, logprobs = sample(logits, rows, positions)
    assert tokens == [well[0], NO_TOKEN, well[2]]
    assert [entry is None for entry in logprobs] == [False, True, False]


class OnDevice:
    """`Scores` that count what leaves the device."""

    max_top = 32

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.tops, self.wholes = values, 0, 0

    def logits(self) -> np.ndarray:
        self.wholes += 1
        return self.values

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        self.tops += 1
        ids = np.argsort(-self.values, axis=1, kind="stable")[:, :k]
        return ids.astype(np.int32), np.take_along_axis(self.values, ids, axis=1)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5, 31]), st.sampled_from([0.3, 1.0]))
def test_the_best_tokens_of_the_device_give_what_all_logits_give(seed: int, top_k: int, top_p: float) -> None:
    """Greedy rows beside random ones; coarse logits, so that ties at the k-th place are common."""
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-12, 12, (4, 300)) / rng.choice([1, 7.0, 1000.0])).astype(np.float32)
    logits[:, ::7] += rng.standard_normal((4, 43)).astype(np.float32)
    rows = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, seed=seed),
        SamplingParams(temperature=1.3, top_k=3, min_p=0.1, seed=seed + 1),
        SamplingParams(temperature=0.0, top_k=7),
    ]
    positions = np.arange(4, dtype=np.int32)
    scores = OnDevice(logits)
    assert choose(scores, rows, positions) == sample(logits, rows, positions)
    assert scores.tops == 1


@pytest.mark.parametrize(
    ("row", "whole"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0, top_k=31), False),
        (SamplingParams(temperature=1.0, top_k=32), True),
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(logprobs=0), True),
    ],
)
def test_no_more_leaves_the_device_than_a_row_needs(row: SamplingParams, whole: bool) -> None:
    scores = OnDevice(np.random.default_rng(1).standard_normal((2, 300)).astype(np.float32))
    choose(scores, [SamplingParams(), row], np.zeros(2, np.int32))
    assert (scores.wholes, scores.tops) == ((1, 0) if whole else (0, 1))


def test_a_row_of_the_device_without_a_number_has_no_token() -> None:
    values = np.zeros((2, 50), np.float32)
    values[1] = np.nan
    tokens, _ = choose(
        OnDevice(values), [SamplingParams(), SamplingParams(temperature=1.0, top_k=2)], np.zeros(2, np.int32)
    )
    assert tokens[1] == NO_TOKEN
