"""The operations in numpy: for devices without cores to run them on (emulated, simulated), and as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from decode_worker.engines.ttnn.cache import DeviceCache
from decode_worker.engines.ttnn.ops import IDLE, Floats, Ints, Step
from transport.geometry.floats import to_bfloat16, to_float32
from transport.geometry.kv import RopeOrder

Shards = list[Floats]
"""One float32 array per chip; a replicated one may stand once for all."""


class NumpyOps:
    """`Ops[Shards]`, float32 arithmetic. `caches` has one entry per chip and holds all the KV there is.

    `inv_freq`: float32 [D/2]. `threads` bounds those of BLAS. `dtype` "bfloat16" rounds weights (they are kept as
    float32). Idle slots are left out of the arithmetic; their logits are 0.
    """

    max_top = 32

    def __init__(
        self,
        caches: Sequence[DeviceCache],
        *,
        slots: int,
        block_size: int,
        inv_freq: Floats,
        rope: RopeOrder,
        dtype: Literal["float32", "bfloat16"],
        threads: int = 1,
    ) -> None:
        self._caches, self._slots, self._block_size = caches, slots, block_size
        self._inv_freq, self._rope, self._dtype = inv_freq, rope, dtype
        self._active: npt.NDArray[np.intp] = np.arange(0)
        self._tokens = self._positions = self._tables = np.zeros(0, np.int32)
        self._cos = self._sin = np.zeros((0, 1, len(inv_freq)), np.float32)
        self._limits = threadpool_limits(threads)  # idle BLAS threads spin: they would keep the other cores busy

    @property
    def chips(self) -> int:
        return len(self._caches)

    @property
    def slots(self) -> int:
        return self._slots

    def weight(self, shards: Sequence[Floats]) -> Shards:
        if self._dtype == "bfloat16":
            return [to_float32(to_bfloat16(shard), "bfloat16") for shard in shards]
        return [np.array(shard, np.float32) for shard in shards]

    def vector(self, shards: Sequence[Floats]) -> Shards:
        return [np.array(shard, np.float32) for shard in shards]

    def table(self, values: Floats) -> Shards:
        return self.weight([values])

    def begin(self, tokens: Ints, positions: Ints, page_tables: Ints) -> None:
        self._active = np.flatnonzero(positions != IDLE)
        self._tokens, self._positions = tokens[self._active], positions[self._active]
        self._tables = page_tables[self._active]
        angles = (self._positions.astype(np.float32)[:, np.newaxis] * self._inv_freq).astype(np.float64)
        self._cos = np.cos(angles).astype(np.float32)[:, np.newaxis]
        self._sin = np.sin(angles).astype(np.float32)[:, np.newaxis]

    def embedding(self, table: Shards) -> Shards:
        return [table[0][self._tokens][np.newaxis, np.newaxis]] * self.chips

    def rms_norm(self, x: Shards, weight: Shards, epsilon: float) -> Shards:
        def one(x: Floats, weight: Floats) -> Floats:
            mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
            return x / np.sqrt(mean + np.float32(epsilon)) * weight

        return [one(part, _of(weight, chip)) for chip, part in enumerate(x)]

    def linear(self, x: Shards, weight: Shards, bias: Shards | None = None) -> Shards:
        out = [part @ _of(weight, chip) for chip, part in enumerate(x)]
        return out if bias is None else [part + _of(bias, chip) for chip, part in enumerate(out)]

    def create_heads(self, qkv: Shards, heads: int, kv_heads: int) -> tuple[Shards, Shards, Shards]:
        dim = 2 * len(self._inv_freq)
        split = [part.reshape(1, len(self._active), heads + 2 * kv_heads, dim) for part in qkv]
        cuts = ((0, heads), (heads, heads + kv_heads), (heads + kv_heads, heads + 2 * kv_heads))
        q, k, v = ([part[:, :, first:last] for part in split] for first, last in cuts)
        return q, k, v

    def rotary(self, x: Shards) -> Shards:
        def one(x: Floats) -> Floats:
            half = x.shape[-1] // 2
            interleaved = self._rope == "interleaved"
            a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
            turned = (a * self._cos - b * self._sin, b * self._cos + a * self._sin)
            if interleaved:
                return np.stack(turned, axis=-1).reshape(x.shape)
            return np.concatenate(turned, axis=-1)

        return [one(part) for part in x]

    def update_cache(self, layer: int, k: Shards, v: Shards) -> None:
        for chip, cache in enumerate(self._caches):
            for slot, position in enumerate(self._positions.tolist()):
                block = int(self._tables[slot, position // self._block_size])
                for tensor, values in ((2 * layer, k[chip]), (2 * layer + 1, v[chip])):
                    cache.store(tensor, block, position % self._block_size, values[0, slot])

    def attend(self, layer: int, q: Shards, scale: float) -> Shards:
        out: Shards = []
        for queries, cache in zip(q, self._caches, strict=True):
            attended = np.empty_like(queries)
            for slot, position in enumerate(self._positions.tolist()):
                blocks = self._tables[slot, : position // self._block_size + 1].tolist()
                keys, values = (cache.read(2 * layer + kind, blocks)[:, : position + 1] for kind in (0, 1))
                grouped = queries[0, slot].reshape(len(keys), -1, keys.shape[-1])
                scores = grouped @ keys.transpose(0, 2, 1) * np.float32(scale)
                scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
                scores /= scores.sum(axis=-1, keepdims=True)
                attended[0, slot] = (scores @ values).reshape(queries.shape[2:])
            out.append(attended)
        return out

    def concat_heads(self, x: Shards, heads: int) -> Shards:
        return [part.reshape(1, 1, part.shape[1], -1) for part in x]

    def add(self, a: Shards, b: Shards) -> Shards:
        return [left + right for left, right in zip(a, b, strict=True)]

    def silu_mul(self, gate: Shards, up: Shards) -> Shards:
        with np.errstate(over="ignore"):  # exp of a large -gate is infinite, and the quotient 0, as it should be
            return [g / (np.float32(1) + np.exp(-g)) * u for g, u in zip(gate, up, strict=True)]

    def all_reduce(self, x: Shards) -> Shards:
        return [sum(x[1:], start=x[0])] * self.chips if self.chips > 1 else x

    def logits(self, x: Shards) -> Floats:
        found = np.concatenate([part[0, 0] for part in x], axis=-1)
        out = np.zeros((self._slots, found.shape[-1]), np.float32)
        out[self._active] = found
        return out

    def top(self, x: Shards, k: int) -> tuple[Ints, Floats]:
        logits = self.logits(x)
        # A stable sort of the negated values leaves ties in the order of their ids.
        ids = logits.argmax(axis=1)[:, np.newaxis] if k == 1 else np.argsort(-logits, axis=1, kind="stable")[:, :k]
        return ids.astype(np.int32), np.take_along_axis(logits, ids, axis=1)

    def run(self, compute: Step[Shards]) -> Shards:
        return compute()

    def close(self) -> None:
        self._limits.restore_original_limits()


def _of(shards: Shards, chip: int) -> Floats:
    return shards[chip if len(shards) > 1 else 0]
