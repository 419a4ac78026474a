"""Content hashes of full KV blocks, chained, so that equal prefixes of equal models have equal hashes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(fingerprint: str, dtype: str) -> bytes:
    """The hash before the first block: KV is only interchangeable within one model and cache dtype."""
    return blake2b(f"{fingerprint}/{dtype}".encode(), digest_size=HASH_BYTES).digest()


def chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block whose predecessor has hash `parent`."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` (the incomplete last block has none)."""
    out, parent = [], root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = chain(parent, token_ids[start : start + block_size])
        out.append(parent)
    return out
