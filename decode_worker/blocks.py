"""The blocks of the KV pool: who holds them, and which hold a known prefix that others may share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from decode_worker.runs import FreeRuns


class OutOfBlocks(Exception):
    """Fewer blocks are free or evictable than were asked for."""


class BlockPool:
    """Reference counts and the prefix cache over blocks 0…num_blocks-1.

    A block is *free*, *held* (reference count > 0), or *cached*: nobody holds it but it contains a full
    block of known tokens, so that it stays findable until its room is needed (least recently used goes
    first). Only `register` makes a block findable: call it once the block's KV is in place for good.
    """

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self._free = FreeRuns(num_blocks)
        self._refs = [0] * num_blocks
        self._hash: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._changes: dict[bytes, bool] = {}

    # ---- counts

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Findable blocks that nobody holds."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free, or cached and therefore evictable."""
        return self.free + self.cached

    @property
    def held(self) -> int:
        return self.total - self.available

    # ---- prefixes

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest resident prefix of the chain `hashes`. Takes no reference."""
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def needed(self, prefix: Sequence[int], fresh: int) -> int:
        """How much `available` shrinks if `prefix` (from `find`) is shared and `fresh` blocks are added."""
        return fresh + sum(1 for block in prefix if block in self._cached)

    def register(self, block: int, digest: bytes) -> None:
        """Make a held, completely written block findable; does nothing if that content is findable already."""
        if not self._refs[block]:
            raise ValueError(f"block {block} is not held")
        if digest in self._by_hash or block in self._hash:
            return
        self._hash[block] = digest
        self._by_hash[digest] = block
        self._note(digest, True)

    def forget(self, blocks: Sequence[int]) -> None:
        """Held blocks are not to be found any more. Requests that share them already go on."""
        for block in blocks:
            digest = self._hash.pop(block, None)
            if digest is not None:
                del self._by_hash[digest]
                self._note(digest, False)

    def resident(self) -> list[bytes]:
        """Hashes of all findable blocks."""
        return list(self._by_hash)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(added, removed) hashes since the last call; what came and went in between is in neither."""
        changes, self._changes = self._changes, {}
        return [h for h, there in changes.items() if there], [h for h, there in changes.items() if not there]

    # ---- blocks

    def allocate(self, count: int, prefix: Sequence[int] = ()) -> list[int]:
        """Hold `prefix` (blocks from `find`) plus `count` fresh blocks → all ids in order.

        Raises OutOfBlocks, holding nothing.
        """
        if self.needed(prefix, count) > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} of {self.total} are available")
        for block in prefix:
            self._cached.pop(block, None)
            self._refs[block] += 1
        while self.free < count:
            block, _ = self._cached.popitem(last=False)
            digest = self._hash.pop(block)
            del self._by_hash[digest]
            self._note(digest, False)
            self._free.give(block)
        fresh = self._free.take(count)
        for block in fresh:
            self._refs[block] = 1
        return [*prefix, *fresh]

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks in request order; of a chain, the end is evicted before what it builds on."""
        for block in reversed(blocks):
            if not self._refs[block]:
                raise ValueError(f"block {block} is not held")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._hash:
                self._cached[block] = None
            else:
                self._free.give(block)

    def _note(self, digest: bytes, there: bool) -> None:
        if self._changes.pop(digest, there) == there:
            self._changes[digest] = there
