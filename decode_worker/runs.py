"""Free block ids, kept as runs of neighbours: a request whose blocks lie together is written in few transfers."""

from __future__ import annotations

from bisect import bisect_left


class FreeRuns:
    """A set of block ids in 0…total-1, all free at first. Costs are linear in the number of runs, not of blocks."""

    def __init__(self, total: int) -> None:
        self._starts: list[int] = [0] if total else []
        self._lengths: dict[int, int] = {0: total} if total else {}
        self._count = total

    def __len__(self) -> int:
        return self._count

    def runs(self) -> list[tuple[int, int]]:
        """(first id, length), ascending; neighbouring runs are merged."""
        return [(start, self._lengths[start]) for start in self._starts]

    def take(self, count: int) -> list[int]:
        """`count` ids: the smallest run that holds them all, else the largest runs, fewest pieces first.

        Raises ValueError if fewer are free.
        """
        if count > self._count:
            raise ValueError(f"{count} blocks asked for, {self._count} are free")
        out: list[int] = []
        while len(out) < count:
            need = count - len(out)
            fitting = [s for s in self._starts if self._lengths[s] >= need]
            if fitting:
                start = min(fitting, key=self._lengths.__getitem__)
                out += self._cut(start, need)
            else:
                start = max(self._starts, key=self._lengths.__getitem__)
                out += self._cut(start, self._lengths[start])
        return out

    def give(self, block: int) -> None:
        """Put one id back. Raises ValueError if it is free already."""
        i = bisect_left(self._starts, block)
        start, length = block, 1
        if i:
            before = self._starts[i - 1]
            end = before + self._lengths[before]
            if end > block:
                raise ValueError(f"block {block} is free already")
            if end == block:
                start, length = before, self._lengths[before] + 1
                i -= 1
                del self._starts[i]
        if i < len(self._starts) and self._starts[i] <= block + 1:
            after = self._starts[i]
            if after == block:
                raise ValueError(f"block {block} is free already")
            length += self._lengths.pop(after)
            del self._starts[i]
        self._starts.insert(i, start)
        self._lengths[start] = length
        self._count += 1

    def _cut(self, start: int, count: int) -> range:
        i = bisect_left(self._starts, start)
        rest = self._lengths.pop(start) - count
        if rest:
            self._starts[i] = start + count
            self._lengths[start + count] = rest
        else:
            del self._starts[i]
        self._count -= count
        return range(start, start + count)
