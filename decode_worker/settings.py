"""Settings of the decode role."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from decode_worker.npu.emulated import P150A_BANK_BYTES, P150A_BANKS
from decode_worker.pool import STAGING_SLOT_BYTES, STAGING_SLOTS, PoolPath
from transport.geometry import KVGeometry
from transport.geometry.kv import TILE, RopeOrder
from transport.messages import Name
from transport.model import kv_shape
from transport.settings import BaseRoleSettings, Bytes, Seconds

Count = Annotated[int, Field(gt=0)]


def _socket_dir() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/hawk-{os.getuid()}")


class DecodeSettings(BaseRoleSettings):
    """A decode worker: an NPU's KV pool, written by prefill workers, and the engine that decodes from it."""

    role: ClassVar[str] = "decode"

    port: int = Field(8200, ge=0, le=65535, description="port to listen on")

    model: Path = Field(..., description="Hugging Face model directory")
    served_name: Name | None = Field(None, description="the model's name for clients (default: the directory's name)")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of weights and arithmetic")
    max_model_len: Count | None = Field(None, description="longest context (default: the model's)")
    engine: Literal["cpu", "numpy", "ttnn"] = Field(
        "cpu",
        description="what computes the model. cpu: this host, fast; numpy: this host, from any device; ttnn: the NPU",
    )
    threads: Count = Field(1, description="threads of the engine")

    device: Literal["emulated", "tenstorrent"] = Field("emulated", description="the NPU whose memory holds the KV")
    device_id: Annotated[int, Field(ge=0)] = Field(
        0, description="tenstorrent: number of the card, as ttnn counts them"
    )
    simulator: bool = Field(False, description="tenstorrent: a simulated p150a instead of a card; slow, for tests")

    channels: Annotated[int, Field(gt=0, le=64)] = Field(P150A_BANKS, description="DRAM channels of the emulated NPU")
    bank_bytes: Bytes = Field(P150A_BANK_BYTES, description="bytes of one channel")
    kv_dtype: Literal["float32", "bfloat16", "bfp8_b"] = Field("bfloat16", description="dtype of the KV cache")
    rope: RopeOrder = Field(
        "half",
        description="order of K's head dim in the cache and of the weights. half: Hugging Face's; interleaved: Meta's",
    )
    block_size: Count = Field(32, description="tokens per KV block, a multiple of 32")
    num_blocks: Count | None = Field(None, description="KV blocks in the pool (default: what kv_bytes hold)")
    kv_bytes: Bytes = Field(512 * 1024 * 1024, description="bytes of the pool where num_blocks does not say")

    kv_path: PoolPath = Field(
        "hawk",
        description="hawk: written in place; relay: into host memory of the same layout, and copied from there; "
        "host, contiguous: staged and re-laid-out",
    )
    staging_bytes: Bytes = Field(256 * 1024 * 1024, description="receive buffer of kv_path host and contiguous")
    staging_slots: Count = Field(STAGING_SLOTS, description="kv_path host: slots of a lease in it, filled in turn")
    staging_slot_bytes: Bytes = Field(
        STAGING_SLOT_BYTES, description="kv_path host: bytes of a slot; P's push_chunk_bytes use it fully"
    )
    relayout_threads: Count = Field(1, description="leases whose landed bytes are moved or checked at once")
    checksum: bool = Field(False, description="compare an xxh3 of all KV that lands with what was sent")
    transport: Literal["shm", "verbs", "nixl"] = Field(
        "shm", description="how KV comes in. shm: from this host; verbs: RDMA; nixl: UCX over TCP and other transports"
    )
    data_host: str | None = Field(
        None, description="verbs, nixl: address that prefill workers reach (default: the NIC's, or else `host`)"
    )
    data_port: int = Field(0, ge=0, le=65535, description="verbs, nixl: port of the data plane (0: any)")
    rdma_devices: str = Field(
        "", description="verbs: NICs, as device[:port[:gid index]],…; empty: the first with an active port"
    )
    lanes: Annotated[int, Field(gt=0, le=1024)] = Field(
        16, description="verbs, nixl: leases of one prefill worker that may be written at the same time"
    )
    socket_dir: Path = Field(default_factory=_socket_dir, description="directory of the data plane's Unix socket")

    max_batch: Annotated[int, Field(gt=0, le=4096)] = Field(32, description="requests per engine step")
    watermark: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="share of the blocks that admission leaves for running requests to grow into"
    )
    lease_ttl_s: Seconds = Field(30.0, description="life of a lease without a sign of its router or writer")
    lease_max_hold_s: Seconds = Field(300.0, description="longest time from a reservation until decoding starts")
    status_interval_s: Seconds = Field(0.05, description="least time between two unasked status messages")
    stall_s: Seconds = Field(60.0, description="an engine step that takes longer makes the worker not ready")

    @model_validator(mode="after")
    def _consistent(self) -> DecodeSettings:
        if self.block_size % TILE:
            raise ValueError(f"block_size: must be a multiple of {TILE}, got {self.block_size}")
        if self.bank_bytes % 64:
            raise ValueError(f"bank_bytes: must be a multiple of 64, got {self.bank_bytes}")
        if self.transport == "nixl" and self.data_host is None and self.host in ("0.0.0.0", "::", ""):
            raise ValueError("data_host: name an address that prefill workers reach, as host is every address")
        if not (self.model / "config.json").is_file():
            raise ValueError(f"model: {self.model} has no config.json; is it a Hugging Face model directory?")
        self._check_device()
        if self.lease_ttl_s < 2 * self.ping_interval_s:
            raise ValueError(
                f"lease_ttl_s: must be at least twice ping_interval_s ({self.ping_interval_s:g}), "
                f"got {self.lease_ttl_s:g}"
            )
        return self

    def _check_device(self) -> None:
        """Raises ValueError for settings of another device, and for paths and engines that cannot work with this."""
        given = self.model_fields_set
        if self.device == "emulated":
            for name in ("device_id", "simulator"):
                if name in given and getattr(self, name):
                    raise ValueError(f"{name}: is a setting of --device tenstorrent, the device is emulated")
            if self.engine == "ttnn":
                raise ValueError(
                    "engine: ttnn computes on a Tenstorrent card; use cpu or numpy, or --device tenstorrent"
                )
            return
        for name in ("channels", "bank_bytes"):
            if name in given:
                raise ValueError(f"{name}: describes the emulated NPU, a Tenstorrent device says that itself")
        if self.engine == "cpu":
            raise ValueError(
                "engine: cpu decodes from memory that the host addresses, a Tenstorrent device's is not; use "
                f"{'numpy' if self.simulator else 'ttnn, or numpy'}"
            )
        if self.simulator and self.engine == "ttnn":
            raise ValueError("engine: ttnn needs a card's cores, the simulator runs no kernels; use numpy")
        if self.simulator and self.device_id:
            raise ValueError(f"device_id: the simulator has one chip, 0, got {self.device_id}")
        if self.kv_path == "contiguous":
            raise ValueError("kv_path: contiguous re-lays out memory that the host addresses; use relay, host or hawk")
        if self.kv_path == "hawk" and self.simulator:
            raise ValueError("kv_path: hawk writes a card's memory by RDMA, the simulator has no card; use relay")
        if self.kv_path == "hawk" and self.transport != "verbs":
            raise ValueError(
                f"kv_path: hawk writes a card's memory by RDMA, which transport {self.transport} cannot; use relay, or "
                "--transport verbs"
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """`rdma_devices`, one by one."""
        return tuple(name.strip() for name in self.rdma_devices.split(",") if name.strip())

    @property
    def model_name(self) -> str:
        return self.served_name or self.model.resolve().name

    def geometry(self, channels: int | None = None) -> KVGeometry:
        """The pool's geometry; `num_blocks`, or as many blocks as `kv_bytes` hold (at least one).

        `channels`: those of the device; the emulated one has as many as are configured.
        """
        shape = kv_shape(self.model)

        def with_blocks(count: int) -> KVGeometry:
            return KVGeometry(
                num_layers=shape.num_layers,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                block_size=self.block_size,
                num_blocks=count,
                num_channels=channels or self.channels,
                dtype=self.kv_dtype,
                rope=self.rope,
            )

        return with_blocks(self.num_blocks or max(1, self.kv_bytes // with_blocks(1).block_bytes))
