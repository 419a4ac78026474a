"""The KV pool in device memory: its tensors, what of it is handed to writers, and the re-layout of staged KV."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from decode_worker.blocks import BlockPool
from decode_worker.npu.base import Buffer, DmaMapping, NpuDevice
from decode_worker.staging import StagingArea
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry
from transport.geometry.floats import SourceDtype
from transport.geometry.staging import scatter, staging_bytes
from transport.messages import Endpoint, KVPath, ModelInfo, PoolDescription, Region

HandedOut = tuple[Region, int, int]
"""(region, fd, page-aligned byte offset of the region in it): what the data plane's receiver gives to writers."""


class KVPool:
    """One K and one V tensor per layer, interleaved over the device's banks.

    `bases[t]` is tensor t's address in every bank of the device. For kv_path `host` (a buffer in host memory)
    and `contiguous` (one in a single bank), writers reach only the staging buffer of `staging_size` bytes.
    Raises OutOfDeviceMemory where the tensors do not fit, ConfigurationError where the device and the
    geometry disagree or the device cannot be written in place.
    """

    def __init__(
        self,
        device: NpuDevice,
        geometry: KVGeometry,
        *,
        kv_path: KVPath = "hawk",
        staging_size: int = 0,
        source_dtype: SourceDtype = "bfloat16",
    ) -> None:
        if device.get_device_num_bank() != geometry.num_channels:
            raise ConfigurationError(
                f"the geometry has {geometry.num_channels} channels, {device.name} {device.get_device_num_bank()} banks"
            )
        self.device, self.geometry, self.kv_path = device, geometry, kv_path
        self.blocks = BlockPool(geometry.num_blocks)
        self.staging: StagingArea | None = None
        self._source_dtype = source_dtype
        self._buffers: list[Buffer] = []
        mappings: list[DmaMapping] = []
        for _ in range(geometry.num_tensors):
            buffer = device.allocate(geometry.num_pages, geometry.page_bytes)
            self._buffers.append(buffer)
            mappings += device.map_buffer_dma(buffer)
        self.bases = tuple(device.get_buffer_address_bank(buffer, 0) for buffer in self._buffers)
        self._channels = _regions(mappings, geometry.num_channels)
        self._start = self._channels[0][2]
        self._staging: HandedOut | None = None
        self._staging_memory: np.ndarray | None = None
        self._own_fd: int | None = None
        if kv_path != "hawk":
            self._make_staging(staging_size)

    def handed_out(self) -> list[HandedOut]:
        """The regions that writers may reach, in the order of `Run.region`."""
        return self._channels if self._staging is None else [self._staging]

    def description(self, worker: str, generation: str, endpoint: Endpoint, model: ModelInfo) -> PoolDescription:
        return PoolDescription(
            worker=worker,
            generation=generation,
            kv_path=self.kv_path,
            geometry=self.geometry,
            bases=tuple(base - self._start for base in self.bases),
            channels=tuple(region for region, _, _ in self._channels),
            staging=None if self._staging is None else self._staging[0],
            staging_dtype=self._source_dtype if self.kv_path == "host" else None,
            endpoint=endpoint,
            model=model,
        )

    def staging_bytes(self, prompt_tokens: int) -> int:
        """Room that a lease takes in the staging buffer."""
        return staging_bytes(self.geometry, self.kv_path, prompt_tokens, self._source_dtype)

    def relayout(self, offset: int, blocks: Sequence[int], prompt_tokens: int, resident_tokens: int) -> None:
        """Move a landed receive buffer into its blocks; from any thread, takes as long as it takes."""
        channels = self.device.host_channels()
        if self._staging_memory is None or channels is None or resident_tokens == prompt_tokens:
            return
        landed = self._staging_memory[offset : offset + self.staging_bytes(prompt_tokens)]
        if self.kv_path == "host":
            # Imported here: the compiler behind it is of use to this path alone.
            from transport.kernels.cpu import from_linear

            from_linear(
                channels,
                self.bases,
                self.geometry,
                blocks,
                landed,
                self._source_dtype,
                prompt_tokens,
                resident_tokens,
            )
        else:
            scatter(channels, self.bases, self.geometry, blocks, landed, prompt_tokens, resident_tokens)

    def close(self) -> None:
        """Unmap and free everything on the device."""
        for buffer in self._buffers:
            self.device.unmap_buffer_dma(buffer)
            self.device.free(buffer)
        self._buffers = []
        if self._own_fd is not None:
            os.close(self._own_fd)
            self._own_fd = None

    def _make_staging(self, size: int) -> None:
        channels = self.device.host_channels()
        if channels is None:
            raise ConfigurationError(f"kv_path {self.kv_path}: the host cannot address {self.device.name}'s memory")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.kv_path == "host":
            self._own_fd = fd = os.memfd_create("hawk-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            self._staging_memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            self._staging = (Region(address=0, rkey=0, length=size), fd, 0)
        else:
            # One page more, so that the region can start where a mapping may.
            buffer = self.device.allocate_contiguous(size + mmap.PAGESIZE)
            self._buffers.append(buffer)
            mapping = self.device.map_buffer_dma(buffer)[0]
            start = -(-mapping.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            self._staging_memory = channels[mapping.bank][start : start + size]
            self._staging = (Region(address=start, rkey=0, length=size), mapping.fd, start)
        self.staging = StagingArea(size)


def _regions(mappings: Sequence[DmaMapping], num_banks: int) -> list[HandedOut]:
    """One region per bank that spans all tensors' shares; starts on a page, as a mapping must."""
    out: list[HandedOut] = []
    for bank in range(num_banks):
        shares = [m for m in mappings if m.bank == bank]
        start = min(m.offset for m in shares) // mmap.PAGESIZE * mmap.PAGESIZE
        stop = max(m.offset + m.length for m in shares)
        out.append((Region(address=start, rkey=0, length=stop - start), shares[0].fd, start))
    return out
