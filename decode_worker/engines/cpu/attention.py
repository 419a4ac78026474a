"""One query token per row against K and V as they lie in the tiles; the new token's row is appended first."""

from __future__ import annotations

import numpy as np

from decode_worker.engines.cpu.jit import kernel
from decode_worker.engines.cpu.tiles import decode_tile, encode_row
from decode_worker.engines.cpu.vector import add_dots, add_weighted_rows, bits_float, prefetch

TILE = 32


@kernel("contract")
def exp(x):
    """e^x in float32 for x <= 0 within 2 units in the last place; 0 below -87 (Cephes' polynomial).

    Free of calls and branches, so that loops over it vectorise.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * bits_float(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@kernel()
def _largest(values, count):
    """The maximum, by integer keys in the order of the floats: maxima of floats do not vectorise."""
    bits = values.view(np.int32)
    top = np.int32(-(1 << 31))
    for i in range(count):
        top = max(top, np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return bits_float(np.uint32(top ^ ((top >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@kernel("reassoc", "contract")
def _softmax(scores, count, scale):
    """In place over scores[:count] · scale, not normalised → the sum."""
    top = _largest(scores, count)
    total = np.float32(0.0)
    for i in range(count):
        scores[i] = exp((scores[i] - top) * scale)
        total += scores[i]
    return total


@kernel("contract")
def rotate(x, at, dim, cos, sin, interleave, out):
    """Rotary embedding of x[at:at + dim] (halves rotated, as HF does) → out[:dim], optionally reordered.

    Reordered: out[2i] = rotated[i], out[2i + 1] = rotated[i + dim/2], the pool's "interleaved" order.
    """
    half = dim // 2
    for i in range(half):
        a, b = x[at + i], x[at + half + i]
        first, second = a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]
        if interleave:
            out[2 * i], out[2 * i + 1] = first, second
        else:
            out[i], out[half + i] = first, second


@kernel()
def _tile_address(pool, tensor, page):
    channel = page % len(pool.channels)
    return pool.channels[channel] + pool.bases[tensor] + page // len(pool.channels) * pool.page_bytes


@kernel()
def _first_page(pool, blocks, head, token):
    """The page of (head, token, dim 0) of the sequence whose block table is `blocks`."""
    block, inside = blocks[token // pool.block_size], token % pool.block_size
    return ((block * pool.heads + head) * (pool.block_size // TILE) + inside // TILE) * (pool.head_dim // TILE)


@kernel()
def append(pool, tensor, blocks, head, token, row):
    """Write row[:head_dim] as token `token` of one head."""
    first = _first_page(pool, blocks, head, token)
    for column in range(pool.head_dim // TILE):
        address = _tile_address(pool, tensor, first + column)
        encode_row(pool.kind, address, token % TILE, row, column * TILE)


@kernel()
def _prefetch_rows(pool, tensor, blocks, head, token):
    """Fetch the tiles of the 32 tokens from `token` on; tiles lie apart, so the hardware does not foresee them."""
    first = _first_page(pool, blocks, head, token)
    for column in range(pool.head_dim // TILE):
        address = _tile_address(pool, tensor, first + column)
        for line in range(0, pool.page_bytes, 64):
            prefetch(address + line)


@kernel()
def _decode_rows(pool, tensor, blocks, head, token, tokens, out):
    """The 32 tokens from `token` on of one head → out [32, head_dim] float32; the next 32 are on their way."""
    if token + TILE < tokens:
        _prefetch_rows(pool, tensor, blocks, head, token + TILE)
    first = _first_page(pool, blocks, head, token)
    for column in range(pool.head_dim // TILE):
        decode_tile(pool.kind, _tile_address(pool, tensor, first + column), out, column * TILE)


@kernel()
def _add_scores(q, group, rows, scores, token):
    """scores[g, token:token + 32] = q[g] · rows; all 32 of them, also where the tile ends early."""
    dim, width = rows.shape[1], scores.shape[1]
    scores[:group, token : token + TILE] = 0
    for n in range(0, TILE, 4):
        g = 0
        while g + 4 <= group:
            add_dots(q, g * dim, dim, rows, n * dim, dim, dim, scores, g * width + token + n, width, 0, 4, 4)
            g += 4
        if g + 2 <= group:
            add_dots(q, g * dim, dim, rows, n * dim, dim, dim, scores, g * width + token + n, width, 0, 2, 4)
            g += 2
        if g < group:
            add_dots(q, g * dim, dim, rows, n * dim, dim, dim, scores, g * width + token + n, width, 0, 1, 4)


@kernel()
def _add_values(scores, group, token, count, rows, out):
    """out[g] += scores[g, token:token + count] · rows[:count]."""
    dim, width = rows.shape[1], scores.shape[1]
    for d in range(0, dim, TILE):
        g = 0
        while g + 4 <= group:
            add_weighted_rows(scores, g * width + token, width, rows, d, dim, count, out, g * dim + d, dim, 4, 2)
            g += 4
        if g + 3 <= group:
            add_weighted_rows(scores, g * width + token, width, rows, d, dim, count, out, g * dim + d, dim, 3, 2)
            g += 3
        while g < group:
            add_weighted_rows(scores, g * width + token, width, rows, d, dim, count, out, g * dim + d, dim, 1, 2)
            g += 1


@kernel()
def attend(pool, layer, blocks, head, position, q, k, v, scale, work, out):
    """Append k, v (float32 [D], K in pool order) of one KV head at `position`, then attend over 0…position.

    q float32 [G, D]: the queries of the heads that share this KV head, in pool order. out float32 [G, D].
    The bytes behind `position` in the last tile are read but never used, whatever they are.
    """
    append(pool, 2 * layer, blocks, head, position, k)
    append(pool, 2 * layer + 1, blocks, head, position, v)
    group, tokens = q.shape[0], position + 1
    for token in range(0, tokens, TILE):
        _decode_rows(pool, 2 * layer, blocks, head, token, tokens, work.rows)
        _add_scores(q, group, work.rows, work.scores, token)
    out[:, :] = 0
    for g in range(group):
        work.totals[g] = _softmax(work.scores[g], tokens, scale)
    for token in range(0, tokens, TILE):
        _decode_rows(pool, 2 * layer + 1, blocks, head, token, tokens, work.rows)
        _add_values(work.scores, group, token, min(TILE, tokens - token), work.rows, out)
    for g in range(group):
        out[g] /= work.totals[g]
