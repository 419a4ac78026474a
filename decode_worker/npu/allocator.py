"""Address allocation over DRAM banks, as a p150a does it: interleaved buffers take one address in every bank."""

from __future__ import annotations

from bisect import bisect_left

from decode_worker.npu.base import BankUsage, OutOfDeviceMemory

ALIGNMENT = 64
"""Bytes; every address and size is a multiple of it (Blackhole DRAM)."""


class _Bank:
    """Free ranges of one bank: sorted, disjoint, never adjacent (neighbours are merged)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free: list[tuple[int, int]] = [(0, size)]

    def take(self, start: int, size: int) -> None:
        i = bisect_left(self.free, (start + 1,)) - 1
        low, high = self.free[i]
        rest = [(low, start), (start + size, high)]
        self.free[i : i + 1] = [(a, b) for a, b in rest if a < b]

    def give(self, start: int, size: int) -> None:
        end = start + size
        i = bisect_left(self.free, (start,))
        if i < len(self.free) and self.free[i][0] == end:
            end = self.free.pop(i)[1]
        if i and self.free[i - 1][1] == start:
            start = self.free.pop(i - 1)[0]
            i -= 1
        self.free.insert(i, (start, end))

    def usage(self) -> BankUsage:
        sizes = [high - low for low, high in self.free]
        return BankUsage(self.size, self.size - sum(sizes), max(sizes, default=0))


class BankAllocator:
    """First fit over `num_banks` banks of `bank_bytes` each; all addresses and sizes 64-byte aligned.

    `lockstep` needs one range that is free in *every* bank, so a bank that single-bank buffers have filled
    stops all interleaved allocation, however much the others have free.
    """

    def __init__(self, num_banks: int, bank_bytes: int) -> None:
        if num_banks <= 0:
            raise ValueError(f"num_banks must be positive, got {num_banks}")
        if bank_bytes <= 0 or bank_bytes % ALIGNMENT:
            raise ValueError(f"bank_bytes must be a positive multiple of {ALIGNMENT}, got {bank_bytes}")
        self._banks = [_Bank(bank_bytes) for _ in range(num_banks)]

    def lockstep(self, size: int) -> int:
        """Lowest address at which `size` bytes are free in every bank; raises OutOfDeviceMemory."""
        size = _aligned(size)
        for low, high in self._common():
            if high - low >= size:
                for bank in self._banks:
                    bank.take(low, size)
                return low
        used = [u.used for u in self.usage()]
        raise OutOfDeviceMemory(
            f"no common range of {size} bytes in {len(used)} banks of {self._banks[0].size} bytes; "
            f"used {min(used)} to {max(used)} per bank"
        )

    def single(self, size: int) -> tuple[int, int]:
        """(bank, address) of `size` bytes in one bank, the least used that has room; raises OutOfDeviceMemory."""
        size = _aligned(size)
        by_use = sorted(range(len(self._banks)), key=lambda b: self._banks[b].usage().used)
        for index in by_use:
            bank = self._banks[index]
            for low, high in bank.free:
                if high - low >= size:
                    bank.take(low, size)
                    return index, low
        largest = max(u.largest_free for u in self.usage())
        raise OutOfDeviceMemory(f"no bank has {size} contiguous bytes; the largest free range is {largest}")

    def release(self, address: int, size: int, bank: int | None) -> None:
        """Give back what `lockstep` (bank None) or `single` returned."""
        for b in self._banks if bank is None else [self._banks[bank]]:
            b.give(address, _aligned(size))

    def usage(self) -> list[BankUsage]:
        return [bank.usage() for bank in self._banks]

    def _common(self) -> list[tuple[int, int]]:
        """Ranges that are free in all banks."""
        common = self._banks[0].free
        for bank in self._banks[1:]:
            common = _intersect(common, bank.free)
        return common


def _aligned(size: int) -> int:
    if size <= 0:
        raise ValueError(f"size must be positive, got {size}")
    return -(-size // ALIGNMENT) * ALIGNMENT


def _intersect(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            out.append((low, high))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return out
