"""Matrix products of a few rows with row-major weights: bound by reading the weights up to about batch 8."""

from __future__ import annotations

from decode_worker.engines.cpu.jit import kernel
from decode_worker.engines.cpu.vector import add_dots

#: weight rows that pass through the level-1 cache once for the whole batch; divisible by the widths below
PANEL = 12


@kernel()
def _add_panel(x, rows, k, w, w_at, out, out_at, out_stride):
    """A full panel for all batch rows; each shape fills the 32 vector registers as far as it can.

    The next panel is prefetched meanwhile: the hardware alone reaches half the read bandwidth at one row and a
    fifth of it at eight.
    """
    m = 0
    while m + 8 <= rows:
        for n in range(0, PANEL, 3):
            add_dots(x, m * k, k, w, w_at + n * k, k, k, out, out_at + m * out_stride + n, out_stride, PANEL * k, 8, 3)
        m += 8
    if m + 4 <= rows:
        for n in range(0, PANEL, 6):
            add_dots(x, m * k, k, w, w_at + n * k, k, k, out, out_at + m * out_stride + n, out_stride, PANEL * k, 4, 6)
        m += 4
    if m + 2 <= rows:
        for n in range(0, PANEL, 6):
            add_dots(x, m * k, k, w, w_at + n * k, k, k, out, out_at + m * out_stride + n, out_stride, PANEL * k, 2, 6)
        m += 2
    if m < rows:
        for n in range(0, PANEL, 6):
            add_dots(x, m * k, k, w, w_at + n * k, k, k, out, out_at + m * out_stride + n, out_stride, PANEL * k, 1, 6)


@kernel()
def add_linear(x, w, layer, out, start, stop):
    """out[:, start:stop] += x · w[layer, start:stop]ᵀ.

    x float32 [B, K], w [L, N, K] float32 or uint16 (bfloat16 bits), out float32 [B, N]; K a multiple of 16.
    """
    rows, k = x.shape
    width = w.shape[1]
    base = layer * width * k
    n = start
    while n + PANEL <= stop:
        _add_panel(x, rows, k, w, base + n * k, out, n, width)
        n += PANEL
    while n < stop:
        for m in range(rows):
            add_dots(x, m * k, k, w, base + n * k, k, k, out, m * width + n, width, 0, 1, 1)
        n += 1
