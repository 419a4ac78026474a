"""What is done with bytes that have landed, in threads beside the event loop: checked, and moved into the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decode_worker.pool import KVPool
from decode_worker.staging import Slots
from transport import checksum
from transport.backends.base import Piece, Run
from transport.errors import ChecksumMismatch
from transport.geometry.kv import TILE
from transport.geometry.pages import PageLayout
from transport.geometry.plan import plan
from transport.geometry.staging import linear_bytes, plan_contiguous, scatter


@dataclass(frozen=True)
class Target:
    """One lease, as far as its bytes are concerned. `blocks` is a copy: the lease's own may grow."""

    lease_id: str
    writer: str
    blocks: Sequence[int]
    prompt_tokens: int
    resident_tokens: int
    staging: Slots | None


class Relayout:
    """Works on one pool's memory; calls for different leases may come from different threads at once."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        if pool.kv_path == "host":
            # Imported here: the compiler behind it is of use to this path alone.
            from transport.kernels import cpu

            self._kernel = cpu
            geometry = pool.geometry
            layout = PageLayout(
                geometry.num_kv_heads, geometry.head_dim, TILE, packing="linear", dtype=pool.source_dtype
            )
            cpu.prepare(geometry, layout)

    def place(self, target: Target, number: int, piece: Piece) -> None:
        """kv_path host: move the lease's n-th announced piece from its slot into the blocks.

        Raises ChecksumMismatch if it is not what was sent.
        """
        pool, geometry = self._pool, self._pool.geometry
        assert target.staging is not None
        assert pool.staging_memory is not None
        if pool.checksum:
            self._check(target, piece, [self._slot(target, number, piece)])
        at = target.staging.of(number)
        linear = pool.staging_memory[at : at + target.staging.slot_bytes]
        tensors = _tensors(piece)
        what = (geometry, target.blocks, linear, pool.source_dtype, piece.start, piece.stop, tensors)
        channels = pool.device.host_channels()
        if channels is not None:
            self._kernel.from_linear(channels, pool.bases, *what)
            return
        tiles = self._kernel.tile_linear(*what)
        for run in plan(geometry, pool.bases, target.blocks, piece.start, piece.stop, tensors):
            data = tiles[run.local_offset : run.local_offset + run.length]
            pool.device.write(run.region, run.remote_offset, data)

    def check(self, target: Target, pieces: Sequence[Piece]) -> None:
        """kv_path hawk, relay and contiguous: raises ChecksumMismatch unless the lease's pieces lie where they were
        sent to.

        The device's barrier comes first, where it is the device's memory: what is looked at is what its cores will see.
        """
        geometry = self._pool.geometry
        if self._pool.mirror is None:
            self._pool.device.barrier()
        for piece in pieces:
            span, tensors = (piece.start, piece.stop), _tensors(piece)
            if target.staging is None:
                runs = plan(geometry, self._pool.bases, target.blocks, *span, tensors)
            else:
                lease = (target.staging.offset, target.blocks, target.prompt_tokens, target.resident_tokens)
                runs = plan_contiguous(geometry, *lease, *span, tensors)
            self._check(target, piece, runs)

    def scatter(self, target: Target) -> None:
        """kv_path contiguous: move the whole lease from its slot into the blocks."""
        pool = self._pool
        channels = pool.device.host_channels()
        assert target.staging is not None
        assert pool.staging_memory is not None
        assert channels is not None
        if target.resident_tokens < target.prompt_tokens:
            landed = pool.staging_memory[target.staging.offset : target.staging.offset + target.staging.slot_bytes]
            span = (target.prompt_tokens, target.resident_tokens)
            scatter(channels, pool.bases, pool.geometry, target.blocks, landed, *span)

    def relay(self, target: Target, go_on: Callable[[], bool]) -> int:
        """kv_path relay: copy the whole lease from host memory into the same bytes of the device → bytes copied.

        Ends early once `go_on` says no.
        """
        mirror = self._pool.mirror
        assert mirror is not None
        return mirror.copy_to(
            self._pool.device, target.blocks, target.resident_tokens, target.prompt_tokens, go_on=go_on
        )

    def _slot(self, target: Target, number: int, piece: Piece) -> Run:
        assert target.staging is not None
        tensors = piece.last_tensor + 1 - piece.first_tensor
        length = linear_bytes(self._pool.geometry, self._pool.source_dtype, piece.start, piece.stop, tensors)
        return Run(0, 0, target.staging.of(number), length)

    def _check(self, target: Target, piece: Piece, runs: Sequence[Run]) -> None:
        found = checksum.landed(self._read, runs, len(piece.digests))
        for region, (here, sent) in enumerate(zip(found, piece.digests, strict=True)):
            if here != sent:
                where = f"channel {region}" if self._pool.staging_memory is None else "staging memory"
                raise ChecksumMismatch(
                    f"lease {target.lease_id}: {where} does not hold what prefill worker {target.writer} sent for "
                    f"tokens [{piece.start}, {piece.stop}) of tensors {piece.first_tensor}…{piece.last_tensor}: "
                    f"xxh3 {here:016x}, sent {sent:016x}"
                )

    def _read(self, region: int, offset: int, length: int) -> np.ndarray:
        staging, mirror = self._pool.staging_memory, self._pool.mirror
        if staging is not None:
            return staging[offset : offset + length]
        if mirror is not None:
            return mirror.channels[region][offset - mirror.start : offset - mirror.start + length]
        channels = self._pool.device.host_channels()
        if channels is not None:
            return channels[region][offset : offset + length]
        return self._pool.device.read(region, offset, length)


def _tensors(piece: Piece) -> range:
    return range(piece.first_tensor, piece.last_tensor + 1)
