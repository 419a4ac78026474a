"""The inner loops as LLVM vector code, and the few memory primitives that numba does not have.

Operands of the vector loops are pairs (contiguous array, offset); offsets and strides count elements. A
vector is 16 float32; on CPUs without AVX-512 LLVM splits it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

_f32, _i8, _i16, _i32, _i64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
_vf32, _vi16, _vi32 = (ir.VectorType(t, LANES) for t in (_f32, _i16, _i32))
_ZERO = ir.Constant(_vf32, [0.0] * LANES)


def _at(b: Any, base: Any, index: Any, llvm_type: Any) -> Any:
    """Pointer of `llvm_type` to element `index` behind the element pointer `base`."""
    return b.bitcast(b.gep(base, [index]), llvm_type.as_pointer())


def _load(b: Any, base: Any, index: Any) -> Any:
    """16 elements as float32; uint16 holds bfloat16, whose bits are the upper half of float32."""
    if base.type.pointee == _f32:
        return b.load(_at(b, base, index, _vf32), align=4)
    bits = b.zext(b.load(_at(b, base, index, _vi16), align=2), _vi32)
    return b.bitcast(b.shl(bits, ir.Constant(_vi32, [16] * LANES)), _vf32)


def _pointers(context: Any, b: Any, signature: Any, args: Any, *operands: int) -> list[Any]:
    """Element pointers of the (array, offset) operand pairs that start at the given argument positions."""
    return [b.gep(context.make_array(signature.args[i])(context, b, args[i]).data, [args[i + 1]]) for i in operands]


def _prefetch(b: Any, base: Any, index: Any) -> None:
    byte = _i8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0i8")
    b.call(function, [b.bitcast(b.gep(base, [index]), byte), _i32(0), _i32(3), _i32(1)])


def _fold(b: Any, sums: list[Any]) -> Any:
    """Lane i of the result is the sum over the lanes of sums[i] (at most 16).

    Lane j is added to j + 8, then j + 4, j + 2, j + 1, however many there are; pairs share the shuffles.
    """
    undefined = ir.Constant(_vf32, ir.Undefined)
    width = LANES
    while width > 1:
        blocks, half = range(0, 2 * LANES, width), width // 2
        lower = ir.Constant(_vi32, [start + i for start in blocks for i in range(half)])
        upper = ir.Constant(_vi32, [start + half + i for start in blocks for i in range(half)])
        pairs = zip(sums[::2], [*sums[1::2], undefined], strict=False)
        sums = [b.fadd(b.shuffle_vector(x, y, lower), b.shuffle_vector(x, y, upper)) for x, y in pairs]
        width = half
    return sums[0]


def _fma(b: Any) -> Any:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(_vf32, [_vf32] * 3), "llvm.fma.v16f32")


@intrinsic(prefer_literal=True)
def add_dots(typingctx, x, x_at, x_stride, w, w_at, w_stride, k, out, out_at, out_stride, ahead, mb, nb):  # type: ignore[no-untyped-def]
    """out[m, n] += Σ_k x[m, k]·w[n, k] for m < mb, n < nb (literals), k a multiple of 16.

    x, out float32; w float32, or uint16 holding bfloat16. The order of the additions depends on k alone, so
    a row's result does not depend on the rows it is batched with. The elements of w that lie `ahead` elements
    on (0: none) are fetched into the cache meanwhile.
    """
    rows, cols = mb.literal_value, nb.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, w, out = _pointers(context, b, signature, args, 0, 3, 7)
        x_stride, w_stride, k, out_stride = args[2], args[5], args[6], args[9]
        ahead, fma = args[10], _fma(b)
        acc = [[cgutils.alloca_once_value(b, _ZERO) for _ in range(cols)] for _ in range(rows)]
        with cgutils.for_range_slice(b, _i64(0), k, _i64(LANES), _i64) as (at, _):
            ws = [_load(b, w, b.add(b.mul(w_stride, _i64(n)), at)) for n in range(cols)]
            for n in range(cols):
                _prefetch(b, w, b.add(b.add(b.mul(w_stride, _i64(n)), at), ahead))
            for m in range(rows):
                xs = _load(b, x, b.add(b.mul(x_stride, _i64(m)), at))
                for n in range(cols):
                    b.store(b.call(fma, [xs, ws[n], b.load(acc[m][n])]), acc[m][n])
        short = ir.VectorType(_f32, cols)
        first = ir.Constant(ir.VectorType(_i32, cols), list(range(cols)))
        for m in range(rows):
            total = _fold(b, [b.load(each) for each in acc[m]])
            where = _at(b, out, b.mul(out_stride, _i64(m)), short)
            b.store(b.fadd(b.load(where, align=4), b.shuffle_vector(total, total, first)), where, align=4)
        return context.get_dummy_value()

    return types.void(x, x_at, x_stride, w, w_at, w_stride, k, out, out_at, out_stride, ahead, mb, nb), codegen


@intrinsic(prefer_literal=True)
def add_weighted_rows(typingctx, p, p_at, p_stride, v, v_at, v_stride, count, out, out_at, out_stride, mb, nb):  # type: ignore[no-untyped-def]
    """out[m, :] += Σ_s p[m, s]·v[s, :] for m < mb, s < count, over 16·nb columns (mb, nb literals). All float32."""
    rows, cols = mb.literal_value, nb.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, v, out = _pointers(context, b, signature, args, 0, 3, 7)
        p_stride, v_stride, count, out_stride = args[2], args[5], args[6], args[9]
        fma = _fma(b)

        def target(m: int, c: int) -> Any:
            return _at(b, out, b.add(b.mul(out_stride, _i64(m)), _i64(c * LANES)), _vf32)

        acc = [[cgutils.alloca_once_value(b, b.load(target(m, c), align=4)) for c in range(cols)] for m in range(rows)]
        with cgutils.for_range_slice(b, _i64(0), count, _i64(1), _i64) as (s, _):
            vs = [_load(b, v, b.add(b.mul(v_stride, s), _i64(c * LANES))) for c in range(cols)]
            for m in range(rows):
                weight = b.load(b.gep(p, [b.add(b.mul(p_stride, _i64(m)), s)]))
                weights = _splat(b, weight)
                for c in range(cols):
                    b.store(b.call(fma, [weights, vs[c], b.load(acc[m][c])]), acc[m][c])
        for m in range(rows):
            for c in range(cols):
                b.store(b.load(acc[m][c]), target(m, c), align=4)
        return context.get_dummy_value()

    return types.void(p, p_at, p_stride, v, v_at, v_stride, count, out, out_at, out_stride, mb, nb), codegen


def _block_float(b: Any, codes: Any, exponent: Any, mantissa_bits: int) -> Any:
    """sign·mantissa·2^(exponent - 126 - mantissa_bits) of 16 codes `sign << mantissa_bits | mantissa` in int32."""

    def splat(value: int) -> Any:
        return ir.Constant(_vi32, [value] * LANES)

    largest = (1 << mantissa_bits) - 1
    magnitude = b.sitofp(b.and_(codes, splat(largest)), _vf32)
    sign = b.shl(b.and_(codes, splat(largest + 1)), splat(31 - mantissa_bits))
    signed = b.bitcast(b.or_(b.bitcast(magnitude, _vi32), sign), _vf32)
    scale = b.bitcast(b.shl(b.zext(exponent, _i32), _i32(23)), _f32)
    scale = b.fmul(scale, ir.Constant(_f32, 2.0 ** (1 - mantissa_bits)))
    return b.fmul(signed, _splat(b, scale))


def _splat(b: Any, value: Any) -> Any:
    undefined = ir.Constant(_vf32, ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, value, _i32(0)), undefined, ir.Constant(_vi32, [0] * LANES))


@intrinsic(prefer_literal=True)
def decode_unit(typingctx, codes, exponent, out, out_at, bits):  # type: ignore[no-untyped-def]
    """16 elements at the address `codes` → out[out_at:out_at + 16] float32.

    `bits` per element is a literal: 32 float32, 16 bfloat16, 8 and 4 block floats, whose shared exponent lies at
    the address `exponent`.
    """
    width = bits.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (out,) = _pointers(context, b, signature, args, 2)
        if width == 32:
            values = _load(b, b.inttoptr(args[0], _f32.as_pointer()), _i64(0))
        elif width == 16:
            values = _load(b, b.inttoptr(args[0], _i16.as_pointer()), _i64(0))
        else:
            packed = ir.VectorType(_i8, 2 * width)
            raw = b.load(b.inttoptr(args[0], packed.as_pointer()), align=1)
            if width == 4:
                raw = b.shuffle_vector(raw, raw, ir.Constant(_vi32, [i // 2 for i in range(LANES)]))
            codes = b.zext(raw, _vi32)
            if width == 4:
                codes = b.lshr(codes, ir.Constant(_vi32, [0, 4] * (LANES // 2)))
            shared = b.load(b.inttoptr(args[1], _i8.as_pointer()))
            values = _block_float(b, codes, shared, width - 1)
        b.store(values, _at(b, out, _i64(0), _vf32), align=4)
        return context.get_dummy_value()

    return types.void(codes, exponent, out, out_at, bits), codegen


@intrinsic
def pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """The address as a void pointer, for numba.carray."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Fetch the cache line at the address; any address will do."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _prefetch(b, b.inttoptr(args[0], _i8.as_pointer()), _i64(0))
        return context.get_dummy_value()

    return types.void(address), codegen


@intrinsic
def float_bits(typingctx, value):  # type: ignore[no-untyped-def]
    """uint32 bits of a float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], _i32)

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, bits):  # type: ignore[no-untyped-def]
    """float32 of 32 bits."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], _f32)

    return types.float32(types.uint32), codegen


@intrinsic
def fetch_add(typingctx, address):  # type: ignore[no-untyped-def]
    """Add one to the int64 at `address`, sequentially consistent; returns the value before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], _i64.as_pointer()), _i64(1), "seq_cst")

    return types.int64(address), codegen


@intrinsic
def load_acquire(typingctx, address):  # type: ignore[no-untyped-def]
    """The int64 at `address`, with acquire order."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(b.inttoptr(args[0], _i64.as_pointer()), "acquire", 8)

    return types.int64(address), codegen


@intrinsic
def yield_cpu(typingctx):  # type: ignore[no-untyped-def]
    """sched_yield(2)."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(_i32, []), "sched_yield")
        return b.call(function, [])

    return types.int32(), codegen
