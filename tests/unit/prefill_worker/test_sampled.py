"""What the engine's answer means for the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefill_worker.sampling import read_output, stop_tokens
from transport.messages import Logprob, Sampling

EOS = frozenset({2})


def output(token: int, *, logprobs: Any = None, cached: int | None = 0, params: Any = None) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[token], logprobs=logprobs)],
        prompt_token_ids=[1] * 100,
        num_cached_tokens=cached,
        kv_transfer_params=params,
    )


@pytest.mark.parametrize(
    ("token", "sampling", "finish"),
    [
        (7, Sampling(max_tokens=2), None),
        (7, Sampling(max_tokens=1), "length"),
        (2, Sampling(max_tokens=2), "stop"),
        (2, Sampling(max_tokens=1), "stop"),
        (2, Sampling(max_tokens=2, ignore_eos=True), None),
        (2, Sampling(max_tokens=1, ignore_eos=True), "length"),
        (9, Sampling(max_tokens=2, stop_token_ids=(9,)), "stop"),
        (2, Sampling(max_tokens=2, stop_token_ids=(2,), ignore_eos=True), "stop"),
    ],
)
def test_case_41_when_the_first_token_ends_the_request(token: int, sampling: Sampling, finish: str | None) -> None:
    assert read_output(output(token), sampling, EOS).finish_reason == finish


def test_stop_tokens_include_eos_unless_ignored() -> None:
    assert stop_tokens(Sampling(max_tokens=1, stop_token_ids=(9,)), EOS) == {2, 9}
    assert stop_tokens(Sampling(max_tokens=1, stop_token_ids=(9,), ignore_eos=True), EOS) == {9}


@pytest.mark.parametrize(("reported", "cached"), [(None, 0), (-1, 0), (64, 64), (100, 100), (128, 100)])
def test_case_45_cached_tokens_are_never_more_than_the_prompt(reported: int | None, cached: int) -> None:
    assert read_output(output(7, cached=reported), Sampling(max_tokens=2), EOS).cached_tokens == cached


def test_case_43_the_first_tokens_logprobs() -> None:
    entries = {
        7: SimpleNamespace(logprob=-3.0, rank=12),
        8: SimpleNamespace(logprob=-0.5, rank=1),
        9: SimpleNamespace(logprob=-1.5, rank=2),
    }
    sampling = Sampling(max_tokens=2, logprobs=2)
    assert read_output(output(7, logprobs=[entries]), sampling, EOS).logprobs == (
        Logprob(token=7, logprob=-3.0, top=((8, -0.5), (9, -1.5))),
    )


def test_logprobs_zero_is_the_chosen_token_alone() -> None:
    entries = {7: SimpleNamespace(logprob=-3.0, rank=12)}
    sampling = Sampling(max_tokens=2, logprobs=0)
    assert read_output(output(7, logprobs=[entries]), sampling, EOS).logprobs == (Logprob(token=7, logprob=-3.0),)


def test_no_logprobs_unless_asked_for() -> None:
    assert read_output(output(7), Sampling(max_tokens=2), EOS).logprobs is None


def test_timings_come_with_the_output() -> None:
    timings = {"queue": 1.0, "prefill": 2.0}
    assert read_output(output(7, params=timings), Sampling(max_tokens=2), EOS).timings == timings
