"""Settings of the prefill role."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from transport.messages import Name
from transport.settings import BaseRoleSettings, Bytes, Seconds

Count = Annotated[int, Field(gt=0)]


class PrefillSettings(BaseRoleSettings):
    """A prefill worker: vLLM behind a session, its KV pushed into decode workers' pools."""

    role: ClassVar[str] = "prefill"

    port: int = Field(8100, ge=0, le=65535, description="port to listen on")

    model: Path = Field(..., description="Hugging Face model directory")
    served_name: Name | None = Field(None, description="the model's name for clients (default: the directory's name)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="dtype of weights and KV")
    max_model_len: Count | None = Field(None, description="longest context (default: the model's)")

    block_size: Count = Field(128, description="tokens per KV block of vLLM; on CPU a multiple of 32")
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(1.0, description="GiB of KV cache")
    prefix_caching: bool = Field(True, description="keep and reuse the KV of finished prompts")
    max_num_batched_tokens: Count = Field(512, description="prompt tokens per engine step (chunked prefill)")
    max_num_seqs: Count = Field(32, description="requests prefilled at the same time")
    max_queued: Count = Field(512, description="requests accepted and not yet prefilled; over it: 503")
    enforce_eager: bool = Field(True, description="do not compile the model")
    threads: Annotated[int, Field(ge=0)] = Field(0, description="OpenMP threads of the engine (0: half of the CPUs)")
    cpus: str | None = Field(None, description="CPUs to run on, as in 0-3,8 (default: any)")

    hold_ttl_s: Seconds = Field(30.0, description="seconds a push may wait without progress before its KV is dropped")
    push_chunk_bytes: Bytes = Field(4 * 1024 * 1024, description="bytes written between two looks at the lease")
    stall_s: Seconds = Field(60.0, description="an engine step that takes longer makes the worker not ready")
    push_threads: Count = Field(1, description="pushes that copy at the same time")
    push_staging_bytes: Bytes = Field(
        64 * 1024 * 1024, description="memory registered for sending, where pools are reached by verbs or nixl"
    )
    rdma_devices: str = Field(
        "", description="NICs to send by, as device[:port[:gid index]],…; empty: the first with an active port"
    )

    @field_validator("cpus")
    @classmethod
    def _known_cpus(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cpus(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> PrefillSettings:
        if self.block_size % 16:
            raise ValueError(f"block_size: must be a multiple of 16, got {self.block_size}")
        if self.push_staging_bytes < 4 * self.push_chunk_bytes:
            raise ValueError(
                f"push_staging_bytes: must hold at least four pieces of push_chunk_bytes ({self.push_chunk_bytes}), "
                f"got {self.push_staging_bytes}"
            )
        if not (self.model / "config.json").is_file():
            raise ValueError(f"model: {self.model} has no config.json; is it a Hugging Face model directory?")
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """`rdma_devices`, one by one."""
        return tuple(name.strip() for name in self.rdma_devices.split(",") if name.strip())

    @property
    def model_name(self) -> str:
        return self.served_name or self.model.resolve().name

    @property
    def omp_threads(self) -> int:
        available = parse_cpus(self.cpus) if self.cpus else os.sched_getaffinity(0)
        return self.threads or max(1, len(available) // 2)


def parse_cpus(text: str) -> set[int]:
    """`"0-3,8"` → {0, 1, 2, 3, 8}. Raises ValueError where it is no such list or names CPUs we may not use."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"cpus: {text!r} is not a list like 0-3,8")
        first = int(match[1])
        cpus |= set(range(first, int(match[2] or first) + 1))
    if missing := cpus - os.sched_getaffinity(0):
        raise ValueError(f"cpus: {sorted(missing)} are not available to this process")
    return cpus
