"""Every message between processes: the only contract between router, prefill and decode workers.

Control messages are frozen pydantic models (validated on receipt, unknown fields refused). `Tokens`, sent
once per engine step, is a plain dataclass. All travel as msgpack over the session (`transport.session`).
Durations are seconds; no wall-clock time crosses a process boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from transport.errors import HawkError, from_code
from transport.geometry import KVGeometry

PROTOCOL_VERSION = 2

Role = Literal["router", "prefill", "decode"]
KVPath = Literal["hawk", "host", "contiguous"]
FinishReason = Literal["stop", "length"]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorInfo(Message):
    """A `HawkError` on the wire."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        if isinstance(error, HawkError):
            return cls(code=error.code, message=error.message, param=error.param)
        return cls(code=HawkError.code, message=f"{type(error).__name__}: {error}")

    def error(self) -> HawkError:
        return from_code(self.code, self.message, param=self.param)


# ---- what workers are ------------------------------------------------------------------------------


class ModelInfo(Message):
    """What a worker serves. `fingerprint` is a hash of the model's config.json: P and D must agree."""

    name: Name
    fingerprint: str
    max_model_len: Positive
    vocab_size: Positive


class Region(Message):
    """One remotely writable memory region (a DRAM channel, or the staging buffer of kv_path host/contiguous)."""

    address: Natural
    rkey: Natural
    length: Positive


class Endpoint(Message):
    """Where a pool's data plane is reached: for `shm`, `address` is the path of a Unix socket."""

    backend: Literal["shm", "verbs", "nixl"]
    address: str


class PoolDescription(Message):
    """All a writer must know of one decode worker's KV pool; valid for one generation of that process.

    `bases[2*layer + v]` (v = 0 for K, 1 for V) is the tensor's byte offset inside every channel region.
    `staging` is the receive buffer of kv_path `host` and `contiguous`, None for `hawk`; `staging_dtype` is
    the element type that kv_path `host` expects in it. Writers reach `channels` with `hawk` alone; the other paths
    have none. `checksum`: every piece must be announced with the xxh3_64 of what it puts into each region.
    """

    worker: Name
    generation: str
    kv_path: KVPath
    geometry: KVGeometry
    bases: tuple[Natural, ...]
    channels: tuple[Region, ...]
    staging: Region | None = None
    staging_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    checksum: bool = False
    endpoint: Endpoint
    model: ModelInfo


class Writer(Message):
    """The one process that may write a lease."""

    worker: Name
    generation: str


class Lease(Message):
    """The right to write one request's KV into `block_ids` of one pool.

    `block_ids` cover the prompt (and more, where D reserves ahead); the first `resident_tokens` tokens
    (whole blocks) are already there and must not be written. `slot` is the data plane's revocation slot
    on the writer's connection. kv_path `host` and `contiguous`: the lease has `staging_slots` slots of
    `staging_slot_bytes` each, one behind the other from `staging_offset` of the staging region on. With `host` the
    n-th announced piece goes into slot n modulo their number, once the piece before it there has been drained.
    """

    id: Name
    worker: Name
    generation: str
    block_ids: tuple[Natural, ...]
    prompt_tokens: Positive
    resident_tokens: Natural
    ttl_s: Annotated[float, Field(gt=0)]
    slot: Natural
    staging_offset: Natural | None = None
    staging_slots: Natural = 0
    staging_slot_bytes: Natural = 0


class Sampling(Message):
    """Sampling of one request, as both engines understand it.

    `logprobs`: None for none, n for the chosen token plus the n most likely (n may be 0).
    `temperature` 0 is greedy. `top_k` 0 is off. `max_tokens` counts every generated token of the request,
    the handed-over first one included.
    """

    max_tokens: Positive
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False


class Logprob(Message):
    """Log-probabilities at one position: the chosen token's, and the `top` alternatives, best first."""

    token: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


# ---- session opening -------------------------------------------------------------------------------


class Attach(Message):
    """Router → worker, first frame of a session."""

    protocol: int
    router: Name
    generation: str


class Hello(Message):
    """Worker → router, answer to `Attach`. `pool` only from decode workers."""

    protocol: int
    role: Role
    worker: Name
    generation: str
    model: ModelInfo
    pool: PoolDescription | None = None
    status: Status


class Ping(Message):
    """Router → worker; keeps the leases of this session alive."""

    seq: Natural


class Pong(Message):
    seq: Natural
    status: Status


class Status(Message):
    """Load of a worker: in `Hello`, in every `Pong`, and whenever it changes much.

    P fills `outstanding_tokens` (prompt tokens not yet prefilled). D fills the block counts.
    """

    ready: bool
    draining: bool = False
    running: Natural = 0
    waiting: Natural = 0
    outstanding_tokens: Natural = 0
    free_blocks: Natural = 0
    total_blocks: Natural = 0


class ResidentBlocks(Message):
    """D → router: block hashes (see `transport.prefix`) that became, or ceased to be, resident."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    reset: bool = False


# ---- pools: router → P -----------------------------------------------------------------------------


class OpenPool(Message):
    """Router → P: connect to this decode worker's data plane. Answered by `PoolOpened` or `PoolRefused`."""

    pool: PoolDescription


class ClosePool(Message):
    """Router → P: this decode worker is gone."""

    worker: Name
    generation: str


class PoolOpened(Message):
    """P → router: connected, geometry fits; leases of this pool are welcome."""

    worker: Name
    generation: str


class PoolRefused(Message):
    """P → router: cannot write into this pool. Also sent later, when an open pool's connection is lost."""

    worker: Name
    generation: str
    error: ErrorInfo


# ---- one request -----------------------------------------------------------------------------------


class Reserve(Message):
    """Router → D. Answered by `Reserved` or `Failed`.

    `block_hashes` are the chained hashes of the prompt's full blocks (root: `prefix.root_hash` of the pool's
    model fingerprint and KV dtype); `tail_tokens` the token ids after them, so that D can go on hashing as it
    decodes. Both empty: the request's blocks are not shared. `max_tokens` (at least 2) counts from this prompt
    on: after a preemption it is what is left, the first token of the new prefill included. `preemptions`: how
    often the request was preempted before; D spares those that were.
    """

    request_id: Name
    prompt_tokens: Positive
    max_tokens: Positive
    block_hashes: tuple[bytes, ...]
    tail_tokens: tuple[TokenId, ...]
    writer: Writer
    preemptions: Natural = 0


class Reserved(Message):
    request_id: Name
    lease: Lease


class Prefill(Message):
    """Router → P. `lease` is None when nothing is to be handed over (max_tokens = 1)."""

    request_id: Name
    token_ids: tuple[TokenId, ...]
    sampling: Sampling
    lease: Lease | None = None


class Prefilled(Message):
    """P → router: the first token. `finish_reason` is set when it also was the last one.

    `timings` in seconds: queue, prefill, …. `cached_tokens` is what P's prefix cache really saved.
    """

    request_id: Name
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: Natural = 0
    timings: dict[str, float] = Field(default_factory=dict)


class Pushed(Message):
    """P → router: every byte of the lease landed and was acknowledged."""

    request_id: Name
    lease_id: Name
    bytes: Natural
    seconds: float


class Decode(Message):
    """Router → D: go on from `token_id` (the first token, not yet in the cache) once the KV has landed.

    `generated` counts the tokens of the request up to and including `token_id`; at
    `sampling.max_tokens` the request is over. D answers with `Tokens`, and ends with a finish reason,
    `Failed` or `PreemptedNotice`.
    """

    request_id: Name
    lease_id: Name
    token_id: TokenId
    generated: Positive
    sampling: Sampling


class Cancel(Message):
    """Router → worker: drop the request now, in whatever state; idempotent, no answer.

    D fences and frees its lease; P aborts engine work and push.
    """

    request_id: Name
    reason: str = ""


class Failed(Message):
    """Worker → router: the request ended in an error here; the worker holds nothing of it any more."""

    request_id: Name
    error: ErrorInfo


class PreemptedNotice(Message):
    """D → router: out of blocks, the request was dropped after the tokens already sent; prefill it again."""

    request_id: Name


@dataclass(slots=True)
class TokenItem:
    """One request's share of an engine step."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[Logprob] | None = None


@dataclass(slots=True)
class Tokens:
    """D → router: the new tokens of one engine step, of all requests of that router together."""

    items: list[TokenItem]


Hello.model_rebuild()
Pong.model_rebuild()
