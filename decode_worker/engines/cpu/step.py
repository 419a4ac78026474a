"""One decode step of a Llama-family model as one compiled call, so that the GIL is taken once per step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from decode_worker.engines.cpu.attention import attend, exp, rotate
from decode_worker.engines.cpu.jit import kernel
from decode_worker.engines.cpu.linear import add_linear
from decode_worker.engines.cpu.vector import fetch_add, load_acquire, yield_cpu


class Weights(NamedTuple):
    """Matrices row-major [L, out, in] as float32 or uint16 (bfloat16 bits); norms and biases float32.

    `qkv` stacks the rows of q, k and v, `gate_up` those of gate and up. A bias of no layers means none.
    """

    embed: np.ndarray
    attn_norm: np.ndarray
    qkv: np.ndarray
    qkv_bias: np.ndarray
    o: np.ndarray
    o_bias: np.ndarray
    mlp_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_bias: np.ndarray
    down: np.ndarray
    down_bias: np.ndarray
    norm: np.ndarray
    lm_head: np.ndarray


class Pool(NamedTuple):
    """Where K and V lie: addresses of the channels, base of every tensor in them, and the geometry."""

    channels: np.ndarray
    bases: np.ndarray
    kind: int
    heads: int
    head_dim: int
    block_size: int
    page_bytes: int
    interleave: bool


class Rows(NamedTuple):
    """The batch: `tokens`, `positions` int32 [B], `blocks` int32 [B, n], `cos`, `sin` float32 [B, D/2]."""

    tokens: np.ndarray
    positions: np.ndarray
    blocks: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Activations(NamedTuple):
    """Buffers that the threads share, float32 [B, …]; `sync` is the barrier's counter, int64 [1]."""

    hidden: np.ndarray
    qkv: np.ndarray
    attended: np.ndarray
    gate_up: np.ndarray
    gated: np.ndarray
    sync: np.ndarray


class Work(NamedTuple):
    """Buffers of one thread: normed hidden states [B, H], one tile row [32, D], scores [G, tokens], sums [G]."""

    normed: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    totals: np.ndarray
    q: np.ndarray
    k: np.ndarray


@kernel()
def _wait_for_all(sync, threads):
    """Barrier: the counter only grows; each round of `threads` arrivals opens the next multiple."""
    if threads == 1:
        return
    address = sync.ctypes.data
    target = (fetch_add(address) // threads + 1) * threads
    spins = 0
    while load_acquire(address) < target:
        spins += 1
        if spins > 1000:
            yield_cpu()


@kernel("reassoc", "contract")
def _rms_norm(x, weight, eps, out):
    rows, width = x.shape
    for m in range(rows):
        total = np.float32(0.0)
        for i in range(width):
            total += x[m, i] * x[m, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[m, i] = x[m, i] * scale * weight[i]


@kernel()
def _load_row(table, row, out):
    """Row of float32, or of uint16 holding bfloat16, as float32."""
    bits = out.view(np.uint32)
    source = table[row]
    if source.itemsize == 2:
        for i in range(len(source)):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
    else:
        source_bits = source.view(np.uint32)
        for i in range(len(source)):
            bits[i] = source_bits[i]


@kernel()
def _linear(x, w, bias, layer, out, start, stop):
    """out[:, start:stop] = x · w[layer]ᵀ + bias."""
    if bias.shape[0]:
        for m in range(x.shape[0]):
            out[m, start:stop] = bias[layer, start:stop]
    else:
        out[:, start:stop] = 0
    add_linear(x, w, layer, out, start, stop)


@kernel()
def _residual_linear(x, w, bias, layer, out, start, stop):
    """out[:, start:stop] += x · w[layer]ᵀ + bias."""
    if bias.shape[0]:
        for m in range(x.shape[0]):
            for n in range(start, stop):
                out[m, n] += bias[layer, n]
    add_linear(x, w, layer, out, start, stop)


@kernel("contract")
def _swiglu(gate_up, out, start, stop):
    """out = silu(gate) · up, for the columns from start to stop."""
    width = out.shape[1]
    for m in range(out.shape[0]):
        for i in range(start, stop):
            gate = gate_up[m, i]
            e = exp(-abs(gate))
            sigmoid = (np.float32(1.0) if gate >= 0 else e) / (np.float32(1.0) + e)
            out[m, i] = gate * sigmoid * gate_up[m, width + i]


@kernel()
def _attention(pool, layer, rows, act, work, scale, task):
    """Row task // heads, KV head task % heads."""
    m, head = task // pool.heads, task % pool.heads
    group, dim = work.q.shape
    queries = act.attended.shape[1]
    qkv = act.qkv[m]
    for g in range(group):
        rotate(qkv, (head * group + g) * dim, dim, rows.cos[m], rows.sin[m], pool.interleave, work.q[g])
    rotate(qkv, queries + head * dim, dim, rows.cos[m], rows.sin[m], pool.interleave, work.k)
    v = qkv[queries + (pool.heads + head) * dim :]
    out = act.attended[m, head * group * dim : (head + 1) * group * dim].reshape(group, dim)
    attend(pool, layer, rows.blocks[m], head, rows.positions[m], work.q, work.k, v, scale, work, out)


@kernel()
def _share(size, thread, threads):
    """The thread's part of `size` columns, in multiples of 16."""
    part = (size + threads * 16 - 1) // (threads * 16) * 16
    return min(thread * part, size), min((thread + 1) * part, size)


@kernel()
def step(weights, pool, rows, act, work, eps, scale, logits, thread, threads):
    """Append and attend for every row → logits float32 [B, V]. All `threads` threads call it together."""
    hidden, batch = act.hidden, len(rows.tokens)
    width, inner = hidden.shape[1], act.gated.shape[1]
    part = _share(width, thread, threads)
    qkv_part = _share(act.qkv.shape[1], thread, threads)
    inner_part = _share(inner, thread, threads)
    for m in range(thread, batch, threads):
        _load_row(weights.embed, rows.tokens[m], hidden[m])
    _wait_for_all(act.sync, threads)
    for layer in range(weights.qkv.shape[0]):
        _rms_norm(hidden, weights.attn_norm[layer], eps, work.normed)
        _linear(work.normed, weights.qkv, weights.qkv_bias, layer, act.qkv, qkv_part[0], qkv_part[1])
        _wait_for_all(act.sync, threads)
        for task in range(thread, batch * pool.heads, threads):
            _attention(pool, layer, rows, act, work, scale, task)
        _wait_for_all(act.sync, threads)
        _residual_linear(act.attended, weights.o, weights.o_bias, layer, hidden, part[0], part[1])
        _wait_for_all(act.sync, threads)
        _rms_norm(hidden, weights.mlp_norm[layer], eps, work.normed)
        for first in (0, inner):
            _linear(
                work.normed, weights.gate_up, weights.gate_up_bias, layer, act.gate_up,
                first + inner_part[0], first + inner_part[1],
            )  # fmt: skip
        _swiglu(act.gate_up, act.gated, inner_part[0], inner_part[1])
        _wait_for_all(act.sync, threads)
        _residual_linear(act.gated, weights.down, weights.down_bias, layer, hidden, part[0], part[1])
        _wait_for_all(act.sync, threads)
    _rms_norm(hidden, weights.norm, eps, work.normed)
    vocab_part = _share(logits.shape[1], thread, threads)
    logits[:, vocab_part[0] : vocab_part[1]] = 0
    add_linear(work.normed, weights.lm_head, 0, logits, vocab_part[0], vocab_part[1])
