"""Sampling of the first token: the router's parameters as vLLM's, and vLLM's output as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transport.messages import FinishReason, Logprob, Sampling

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the engine made of a prompt. `timings` in seconds."""

    token_id: int
    logprobs: tuple[Logprob, ...] | None
    finish_reason: FinishReason | None
    cached_tokens: int
    timings: dict[str, float] = field(default_factory=dict)


def sampling_params(sampling: Sampling, eos: frozenset[int], transfer: Mapping[str, Any] | None) -> SamplingParams:
    """For exactly one token; `transfer` reaches the connector as the request's `kv_transfer_params`."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        stop_token_ids=sorted(stop_tokens(sampling, eos)),
        ignore_eos=sampling.ignore_eos,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": dict(transfer)} if transfer is not None else None,
    )


def stop_tokens(sampling: Sampling, eos: frozenset[int]) -> frozenset[int]:
    """Tokens that end the request."""
    wanted = frozenset(sampling.stop_token_ids)
    return wanted if sampling.ignore_eos else wanted | eos


def read_output(output: RequestOutput, sampling: Sampling, eos: frozenset[int]) -> Sampled:
    """vLLM's answer to a request made with `sampling_params`."""
    completion = output.outputs[0]
    (token_id,) = completion.token_ids
    finish: FinishReason | None = None
    if token_id in stop_tokens(sampling, eos):
        finish = "stop"
    elif sampling.max_tokens == 1:
        finish = "length"
    prompt_tokens = len(output.prompt_token_ids or ())
    return Sampled(
        token_id=token_id,
        logprobs=_logprobs(completion.logprobs, token_id, sampling.logprobs),
        finish_reason=finish,
        cached_tokens=min(max(output.num_cached_tokens or 0, 0), prompt_tokens),
        timings=dict(output.kv_transfer_params or {}),
    )


def _logprobs(positions: Any, token_id: int, top: int | None) -> tuple[Logprob, ...] | None:
    """`positions`: one dict (token → vLLM's Logprob) per sampled token, the chosen one always in it."""
    if top is None or positions is None:
        return None
    (entries,) = positions
    best = sorted(((entry.rank, token, entry.logprob) for token, entry in entries.items()), key=lambda item: item[0])
    return (
        Logprob(
            token=token_id,
            logprob=entries[token_id].logprob,
            top=tuple((token, logprob) for _, token, logprob in best[:top]),
        ),
    )
