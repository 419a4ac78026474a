"""LLVM IR for one 16x16 face: load it from a page of any packing, convert it, store it.

Everything is straight-line vector code on 16 rows of 16 elements, so the compiler has nothing to guess: a
transposing page costs shuffles in registers, no scratch memory. Addresses are i64 values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llvmlite import ir  # type: ignore[import-untyped]

from transport.geometry.floats import BFLOAT16_NAN, SourceDtype
from transport.geometry.kv import FACE, KVDtype
from transport.geometry.tiles import MANTISSA_BITS
from transport.kernels.source import LINE

#: how a face lies in its page: rows or columns contiguous, or the amx pairings of K and V
Load = Literal["rows", "columns", "amx_k", "amx_v"]

Value = Any
Builder = Any

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


@dataclass(frozen=True)
class FaceSource:
    """Addresses of a face's left and right 8 columns, and the byte strides of rows and columns.

    With `interleave` the two halves are woven, out[2i] = left[i], out[2i+1] = right[i]: the RoPE permutation.
    """

    left: Value
    right: Value
    row_stride: Value
    column_stride: Value
    interleave: bool


def i64(value: int) -> Value:
    return ir.Constant(I64, value)


def vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def splat(value: int, element: Any = I32, lanes: int = FACE) -> Value:
    return ir.Constant(vector(element, lanes), [value] * lanes)


def shuffle(b: Builder, first: Value, second: Value, picks: Sequence[int]) -> Value:
    return b.shuffle_vector(first, second, ir.Constant(vector(I32, len(picks)), list(picks)))


def load(b: Builder, address: Value, element: Any, lanes: int) -> Value:
    return b.load(b.inttoptr(address, vector(element, lanes).as_pointer()), align=1)


def store(b: Builder, value: Value, address: Value, streaming: bool) -> None:
    """Store a vector; `streaming` past the caches, where whole aligned lines are written."""
    lanes, bits = value.type.count, value.type.element.width
    instruction = b.store(
        value, b.inttoptr(address, value.type.as_pointer()), align=lanes * bits // 8 if streaming else 1
    )
    if streaming:
        instruction.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(I32, 1)]))


def offset(b: Builder, address: Value, stride: Value, count: int) -> Value:
    return b.add(address, b.mul(stride, i64(count)))


# ---- load ------------------------------------------------------------------------------------------------


def load_face(b: Builder, kind: Load, element: Any, source: FaceSource) -> Iterator[Value]:
    """The face's rows, 16 vectors of 16 elements (`element` is i16 or i32); each is loaded when it is asked for."""
    if kind == "rows":
        return (_load_row(b, element, source, row) for row in range(FACE))
    return iter(_load_whole(b, kind, element, source))


def _load_whole(b: Builder, kind: Load, element: Any, source: FaceSource) -> list[Value]:
    if kind == "columns":
        left = [load(b, offset(b, source.left, source.column_stride, c), element, FACE) for c in range(8)]
        right = [load(b, offset(b, source.right, source.column_stride, c), element, FACE) for c in range(8)]
        pairs = zip(left, right, strict=True)
        return transpose(b, [v for pair in pairs for v in pair] if source.interleave else left + right)
    if kind == "amx_k":
        return _load_amx_k(b, source)
    return _load_amx_v(b, source)


def _load_row(b: Builder, element: Any, source: FaceSource, row: int) -> Value:
    left = offset(b, source.left, source.row_stride, row)
    if not source.interleave:
        return load(b, left, element, FACE)
    right = offset(b, source.right, source.row_stride, row)
    picks = [8 * (lane % 2) + lane // 2 for lane in range(FACE)]
    return shuffle(b, load(b, left, element, 8), load(b, right, element, 8), picks)


def _load_amx_k(b: Builder, source: FaceSource) -> list[Value]:
    """[D/2][16 tokens][2 dims]: a line holds one pair of dims of 16 tokens."""
    one = i64(LINE)
    left = [load(b, offset(b, source.left, one, q), I32, FACE) for q in range(4)]
    right = [load(b, offset(b, source.right, one, q), I32, FACE) for q in range(4)]
    lines = left + right
    if source.interleave:
        low, high, half = splat(0xFFFF), splat(0xFFFF0000), splat(16)
        lines = []
        for x, y in zip(left, right, strict=True):
            lines.append(b.or_(b.and_(x, low), b.shl(y, half)))
            lines.append(b.or_(b.lshr(x, half), b.and_(y, high)))
    rows = []
    for first in (0, 8):
        part = [shuffle(b, line, line, range(first, first + 8)) for line in lines]
        rows += transpose(b, part)
    return [b.bitcast(row, vector(I16, FACE)) for row in rows]


def _load_amx_v(b: Builder, source: FaceSource) -> list[Value]:
    """[N/2][16 dims][2 tokens]: a line holds 16 dims of one pair of tokens."""
    rows = []
    for pair in range(8):
        line = load(b, offset(b, source.left, i64(LINE), pair), I16, 2 * FACE)
        rows += [shuffle(b, line, line, range(token, 2 * FACE, 2)) for token in (0, 1)]
    return rows


def transpose(b: Builder, rows: Sequence[Value]) -> list[Value]:
    """Transpose n vectors of n elements, n a power of two, by log2(n) exchanges of off-diagonal halves."""
    out, lanes = list(rows), len(rows)
    width = lanes // 2
    while width:
        upper = [k if not k & width else lanes + k - width for k in range(lanes)]
        lower = [k + width if not k & width else lanes + k for k in range(lanes)]
        for i in range(lanes):
            if not i & width:
                x, y = out[i], out[i + width]
                out[i], out[i + width] = shuffle(b, x, y, upper), shuffle(b, x, y, lower)
        width //= 2
    return out


# ---- convert ---------------------------------------------------------------------------------------------


def float_bits(b: Builder, row: Value, source: SourceDtype) -> Value:
    """Row of any source dtype → <16 x i32> float32 bits."""
    if source == "float32":
        return row
    if source == "float16":
        wide = b.fpext(b.bitcast(row, vector(ir.HalfType(), FACE)), vector(ir.FloatType(), FACE))
        return b.bitcast(wide, vector(I32, FACE))
    return b.shl(b.zext(row, vector(I32, FACE)), splat(16))


def bfloat16_bits(b: Builder, bits: Value) -> Value:
    """float32 bits → <16 x i16>: round to nearest even, one NaN for all (as `floats.to_bfloat16`)."""
    upper = b.lshr(bits, splat(16))
    rounded = b.lshr(b.add(bits, b.add(splat(0x7FFF), b.and_(upper, splat(1)))), splat(16))
    is_nan = b.icmp_unsigned(">", b.and_(bits, splat(0x7FFFFFFF)), splat(0x7F800000))
    return b.trunc(b.select(is_nan, splat(BFLOAT16_NAN), rounded), vector(I16, FACE))


def block_float(
    b: Builder, rows: Sequence[Value], source: SourceDtype, mantissa_bits: int
) -> tuple[list[Value], Value]:
    """One or two face rows → (shared exponent of each as i8, codes of all as <n x i8>), as `tiles` defines them.

    bf16 stays in 16-bit lanes: an 8-bit significand shifted so far that a bit falls off 15 is below a half anyway.
    """
    if source == "bfloat16":
        parts, element, fraction, width = list(rows), I16, 7, 15
    else:
        parts, element, fraction, width = [float_bits(b, row, source) for row in rows], I32, 23, 24
    lane, lanes = element.width, FACE * len(rows)

    def const(value: int) -> Value:
        return splat(value, element, lanes)

    def minimum(value: Value, limit: int) -> Value:
        return b.select(b.icmp_unsigned("<", value, const(limit)), value, const(limit))

    reduce = b.module.declare_intrinsic(
        f"llvm.vector.reduce.umax.v16i{lane}", fnty=ir.FunctionType(element, [parts[0].type])
    )
    mask, shift = splat(0xFF, element), splat(fraction, element)
    shared = [b.call(reduce, [b.and_(b.lshr(part, shift), mask)]) for part in parts]
    spread = [b.insert_element(splat(0, element), value, I32(0)) for value in shared]
    shared_lanes = shuffle(b, spread[0], spread[-1], ([0] * FACE + [FACE] * FACE)[:lanes])
    bits = shuffle(b, parts[0], parts[-1], range(lanes))
    exponent = b.and_(b.lshr(bits, const(fraction)), const(0xFF))
    mantissa = b.or_(b.and_(bits, const((1 << fraction) - 1)), const(1 << fraction))
    mantissa = b.shl(mantissa, const(width - fraction - 1))
    mantissa = b.select(b.icmp_unsigned("==", exponent, const(0)), const(0), mantissa)
    mantissa = b.lshr(mantissa, minimum(b.sub(shared_lanes, exponent), lane - 1))
    drop = width - mantissa_bits
    odd = b.and_(b.lshr(mantissa, const(drop)), const(1))
    rounded = b.lshr(b.add(mantissa, b.add(const((1 << (drop - 1)) - 1), odd)), const(drop))
    rounded = minimum(rounded, (1 << mantissa_bits) - 1)
    sign = b.shl(b.lshr(bits, const(lane - 1)), const(mantissa_bits))
    signed = b.select(b.icmp_unsigned("==", rounded, const(0)), const(0), b.or_(sign, rounded))
    return [b.trunc(value, I8) for value in shared], b.trunc(signed, vector(I8, lanes))


def encode_rows(
    b: Builder, rows: Sequence[Value], source: SourceDtype, target: KVDtype
) -> tuple[list[Value], list[Value]]:
    """Rows of a face, an even number of them for block floats → (their bytes in the target dtype, as vectors
    that follow each other; the shared exponents of a block float)."""
    if source == target:
        return list(rows), []
    if target == "float32":
        return [float_bits(b, row, source) for row in rows], []
    if target == "bfloat16":
        return [bfloat16_bits(b, float_bits(b, row, source)) for row in rows], []
    data: list[Value] = []
    exponents: list[Value] = []
    together = 2 if source == "bfloat16" else 1  # as many as fill a vector register
    for first in range(0, len(rows), together):
        shared, codes = block_float(b, rows[first : first + together], source, MANTISSA_BITS[target])
        if target == "bfp4_b":
            lanes = FACE * together
            low, high = (shuffle(b, codes, codes, range(start, lanes, 2)) for start in (0, 1))
            codes = b.or_(low, b.shl(high, splat(4, I8, lanes // 2)))
        data.append(codes)
        exponents += shared
    return data, exponents


# ---- store -----------------------------------------------------------------------------------------------


def store_rows(b: Builder, rows: Sequence[Value], address: Value, stride: Value) -> None:
    """Store a face's rows one by one, `stride` bytes apart."""
    for index, row in enumerate(rows):
        store(b, row, offset(b, address, stride, index), streaming=False)


def store_line(b: Builder, rows: Sequence[Value], address: Value, streaming: bool) -> None:
    """Store vectors that make up one cache line, one after the other."""
    line = list(rows)
    while len(line) > 1:
        lanes = 2 * line[0].type.count
        line = [shuffle(b, x, y, range(lanes)) for x, y in zip(line[0::2], line[1::2], strict=True)]
    store(b, line[0], address, streaming)


def store_exponents(b: Builder, exponents: Sequence[Value], address: Value) -> None:
    """Store the 16 exponent bytes of a face."""
    packed = splat(0, I8)
    for lane, exponent in enumerate(exponents):
        packed = b.insert_element(packed, exponent, I32(lane))
    store(b, packed, address, streaming=False)
