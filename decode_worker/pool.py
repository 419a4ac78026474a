"""The KV pool in device memory: its tensors, and what of it is handed to writers."""

from __future__ import annotations

import mmap
import os
from typing import Literal

import numpy as np

from decode_worker.blocks import BlockPool
from decode_worker.mirror import Mirror
from decode_worker.npu.base import Buffer, DmaMapping, NpuDevice
from decode_worker.staging import StagingArea
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry
from transport.geometry.floats import SourceDtype
from transport.geometry.kv import TILE
from transport.geometry.staging import contiguous_bytes, linear_bytes, linear_row_bytes
from transport.messages import Endpoint, ModelInfo, PoolDescription, Region

PoolPath = Literal["hawk", "relay", "host", "contiguous"]
"""How KV gets into the pool. A writer cannot tell `relay` from `hawk`: the same plan, the same offsets."""

HandedOut = tuple[Region, int, int]
"""(region, fd, page-aligned byte offset of the region in it): what the data plane's receiver gives to writers."""

STAGING_SLOTS = 3
STAGING_SLOT_BYTES = 4 * 1024 * 1024
"""Slots of a lease on kv_path host: one is written, one is read, one is on its way from the one to the other."""


class KVPool:
    """One K and one V tensor per layer, interleaved over the device's banks.

    `bases[t]` is tensor t's address in every bank of the device. With kv_path `relay` writers get a `mirror` of the
    pool in host memory, out of which what has landed is copied to the device. With `host` (a region of host memory)
    and `contiguous` (one in a single bank), writers reach only the staging region of `staging_size` bytes: with
    `host`, `slots` slots of at most `slot_bytes` for each lease. `checksum`: writers announce digests.
    Raises OutOfDeviceMemory where the tensors do not fit, ConfigurationError where the device and the
    geometry disagree, the device cannot be written in place, or the slots do not fit.
    """

    def __init__(
        self,
        device: NpuDevice,
        geometry: KVGeometry,
        *,
        kv_path: PoolPath = "hawk",
        staging_size: int = 0,
        source_dtype: SourceDtype = "bfloat16",
        slots: int = STAGING_SLOTS,
        slot_bytes: int = STAGING_SLOT_BYTES,
        checksum: bool = False,
    ) -> None:
        if device.get_device_num_bank() != geometry.num_channels:
            raise ConfigurationError(
                f"the geometry has {geometry.num_channels} channels, {device.name} {device.get_device_num_bank()} banks"
            )
        self.device, self.geometry, self.kv_path, self.checksum = device, geometry, kv_path, checksum
        self.source_dtype = source_dtype
        self.blocks = BlockPool(geometry.num_blocks)
        self.staging: StagingArea | None = None
        self.staging_memory: np.ndarray | None = None
        self._slots = slots
        self._slot_bytes = self._whole_rows(slot_bytes) if kv_path == "host" else 0
        self._buffers: list[Buffer] = []
        self._mapped: list[Buffer] = []
        shape = (geometry.num_blocks, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
        for _ in range(geometry.num_tensors):
            self._buffers.append(device.allocate_tensor(shape, geometry.dtype))
        self.bases = tuple(device.get_buffer_address_bank(buffer, 0) for buffer in self._buffers)
        self.mirror = Mirror(geometry, self.bases) if kv_path == "relay" else None
        self._start = min(self.bases) // mmap.PAGESIZE * mmap.PAGESIZE if kv_path in ("hawk", "relay") else 0
        """The address that byte 0 of each channel region stands for; a region starts on a page, as a mapping must."""
        self._channels: list[HandedOut] = []
        if self.mirror is not None:
            self._channels = self.mirror.handed_out()
        elif kv_path == "hawk":  # a device that peers cannot reach has other paths, but not this call
            self._channels = self._map_channels()
        self._staging: HandedOut | None = None
        self._own_fd: int | None = None
        if kv_path in ("host", "contiguous"):
            self._make_staging(staging_size)

    def handed_out(self) -> list[HandedOut]:
        """The regions that writers may reach, in the order of `Run.region`."""
        return self._channels if self._staging is None else [self._staging]

    def description(self, worker: str, generation: str, endpoint: Endpoint, model: ModelInfo) -> PoolDescription:
        return PoolDescription(
            worker=worker,
            generation=generation,
            kv_path="hawk" if self.kv_path == "relay" else self.kv_path,
            geometry=self.geometry,
            bases=tuple(base - self._start for base in self.bases),
            channels=tuple(region for region, _, _ in self._channels),
            staging=None if self._staging is None else self._staging[0],
            staging_dtype=self.source_dtype if self.kv_path == "host" else None,
            checksum=self.checksum,
            endpoint=endpoint,
            model=model,
        )

    def staging_room(self, prompt_tokens: int, resident_tokens: int) -> tuple[int, int]:
        """(slots, bytes of each) that a lease takes in the staging region; a short prompt has small slots."""
        if self.kv_path == "contiguous":
            return 1, contiguous_bytes(self.geometry, prompt_tokens)
        start = min(resident_tokens, (prompt_tokens - 1) // TILE * TILE)
        whole = linear_bytes(self.geometry, self.source_dtype, start, prompt_tokens, self.geometry.num_tensors)
        return self._slots, min(self._slot_bytes, whole)

    def close(self) -> None:
        """Unmap and free everything on the device."""
        for buffer in self._mapped:
            self.device.unmap_buffer_dma(buffer)
        for buffer in self._buffers:
            self.device.free(buffer)
        self._buffers, self._mapped = [], []
        if self.mirror is not None:
            self.mirror.close()
        if self._own_fd is not None:
            os.close(self._own_fd)
            self._own_fd = None

    def _map(self, buffer: Buffer) -> list[DmaMapping]:
        mappings = self.device.map_buffer_dma(buffer)
        self._mapped.append(buffer)
        return mappings

    def _map_channels(self) -> list[HandedOut]:
        """One region per bank that spans all tensors' shares."""
        lengths: dict[int, int] = {}
        origins: dict[int, tuple[int, int]] = {}
        for buffer, base in zip(list(self._buffers), self.bases, strict=True):
            for mapping in self._map(buffer):
                origin = (mapping.fd, mapping.offset - (base - self._start))
                if origins.setdefault(mapping.bank, origin) != origin:
                    raise ConfigurationError(
                        f"{self.device.name} shows bank {mapping.bank} in several pieces, and the pool lies in more "
                        "than one of them: lower num_blocks or kv_bytes, or use --kv-path relay"
                    )
                lengths[mapping.bank] = max(lengths.get(mapping.bank, 0), base - self._start + mapping.length)
        return [
            (Region(address=offset, rkey=0, length=lengths[bank]), fd, offset)
            for bank, (fd, offset) in sorted(origins.items())
        ]

    def _whole_rows(self, slot_bytes: int) -> int:
        """The most of `slot_bytes` that pieces can fill."""
        row = linear_row_bytes(self.geometry, self.source_dtype)
        if slot_bytes < row:
            raise ConfigurationError(
                f"a staging slot of {slot_bytes} bytes does not hold 32 tokens of one tensor in "
                f"{self.source_dtype}: staging_slot_bytes must be at least {row}"
            )
        return slot_bytes // row * row

    def _make_staging(self, size: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.kv_path == "host":
            if self._slots * self._slot_bytes > size:
                raise ConfigurationError(
                    f"{self._slots} staging slots of {self._slot_bytes} bytes, as one lease takes, do not fit into "
                    f"{size} bytes: raise staging_bytes, or lower staging_slots or staging_slot_bytes"
                )
            self._own_fd = fd = os.memfd_create("hawk-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            self.staging_memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            self._staging = (Region(address=0, rkey=0, length=size), fd, 0)
        else:
            channels = self.device.host_channels()
            if channels is None:
                raise ConfigurationError(f"kv_path contiguous: the host cannot address {self.device.name}'s memory")
            # One page more, so that the region can start where a mapping may.
            buffer = self.device.allocate_contiguous(size + mmap.PAGESIZE)
            self._buffers.append(buffer)
            mapping = self._map(buffer)[0]
            start = -(-mapping.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            self.staging_memory = channels[mapping.bank][start : start + size]
            self._staging = (Region(address=start, rkey=0, length=size), mapping.fd, start)
        self.staging = StagingArea(size)
