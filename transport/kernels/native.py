"""Native code for the tiles of some tensors: the loops around `faces`, compiled once per variant.

Compiled in memory with llvmlite for the CPU it runs on: some 0.1 s per variant, no compiler, no cache
directory. Called through ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]

from transport.geometry.floats import ITEM_BYTES, SourceDtype
from transport.geometry.kv import FACE, TILE, TILE_BYTES, KVDtype
from transport.geometry.tiles import MANTISSA_BITS
from transport.kernels import faces
from transport.kernels.faces import I8, I16, I32, I64, Builder, FaceSource, Load, Value, i64
from transport.kernels.source import LINE


@dataclass(frozen=True)
class Variant:
    """What code is specialised for. `rows`: targets are row-major (layout gpu, linear staging), not tiles.

    `streaming`: target addresses are multiples of 64, so that whole lines go past the caches.
    """

    load: Load
    interleave: bool
    source: SourceDtype
    target: KVDtype
    rows: bool
    streaming: bool

    @property
    def copies_rows(self) -> bool:
        """Neither order nor dtype changes within a row."""
        return self.rows and self.load == "rows" and not self.interleave and self.source == self.target


#: what a kernel takes, in this order; `*` is the address of an int64 array
ARGUMENTS = (
    "tensors",  # N
    "tiles",  # T
    "heads",  # H
    "columns",  # C
    "layers*",  # [N] source address of each tensor's layer
    "groups*",  # [2T] byte offset of each group of 16 token rows in a layer
    "valid*",  # [2T] rows of each group that hold tokens
    "units*",  # [T, H, C] target addresses (variant.rows: [T, H])
    "steps*",  # the same shape: unit u of tensor i lies at units[u] + shifts[i] + places[i] * steps[u]
    "shifts*",  # [N]
    "places*",  # [N]
    "head_stride",  # strides are bytes
    "row_stride",
    "column_stride",
    "head_dim",
    "target_stride",  # between the rows of a row-major target
)
Kernel = Callable[..., None]


@cache
def kernel(variant: Variant) -> Kernel:
    """The compiled kernel, to be called with the ints of `ARGUMENTS`; counts are at least 1.

    Rows past `valid[g]` are written as zeros. The caller vouches for every address.
    """
    module = ir.Module("hawk")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * len(ARGUMENTS)), "transform")
    builder = ir.IRBuilder(function.append_basic_block())
    _emit(builder, variant, dict(zip(ARGUMENTS, function.args, strict=True)))
    if variant.streaming:
        builder.fence("seq_cst")  # streaming stores are weakly ordered; the completion must not overtake them
    builder.ret_void()
    engine = _compile(module)
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(ARGUMENTS))
    code = prototype(engine.get_function_address("transform"))

    def call(*arguments: int) -> None:
        code(*arguments)

    call.engine = engine  # type: ignore[attr-defined]  # owns the code
    return call


def _compile(module: Any) -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


@contextmanager
def _loop(b: Builder, count: Value) -> Iterator[Value]:
    """`for i in range(count)`, count ≥ 1."""
    before = b.block
    body, after = b.append_basic_block(), b.append_basic_block()
    b.branch(body)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(i64(0), before)
    yield index
    following = b.add(index, i64(1))
    index.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, after)
    b.position_at_end(after)


def _entry(b: Builder, array: Value, index: Value) -> Value:
    return b.load(b.gep(b.inttoptr(array, I64.as_pointer()), [index]))


def _emit(b: Builder, variant: Variant, args: dict[str, Value]) -> None:
    head_dim, target_stride = args["head_dim"], args["target_stride"]
    with (
        _loop(b, args["tensors"]) as tensor,
        _loop(b, args["tiles"]) as tile,
        _loop(b, args["heads"]) as head,
    ):
        row = b.add(b.mul(tile, args["heads"]), head)
        from_head = b.add(_entry(b, args["layers*"], tensor), b.mul(head, args["head_stride"]))

        def unit_at(index: Value) -> Value:
            step = b.mul(_entry(b, args["places*"], tensor), _entry(b, args["steps*"], index))
            return b.add(b.add(_entry(b, args["units*"], index), _entry(b, args["shifts*"], tensor)), step)

        def group_at(half: Value) -> tuple[Value, Value]:
            group = b.add(b.mul(tile, i64(2)), half)
            return b.add(from_head, _entry(b, args["groups*"], group)), _entry(b, args["valid*"], group)

        if variant.copies_rows:
            unit = unit_at(row)
            row_bytes = b.mul(head_dim, i64(ITEM_BYTES[variant.source]))
            with _loop(b, i64(2)) as half:
                start, count = group_at(half)
                target = b.add(unit, b.mul(b.mul(half, i64(FACE)), target_stride))
                _copy_rows(b, variant, start, args["row_stride"], target, target_stride, count, row_bytes)
                _zero_rows(b, count, target, target_stride, row_bytes)
            return
        with _loop(b, args["columns"]) as column:
            unit = unit_at(row if variant.rows else b.add(b.mul(row, args["columns"]), column))
            with _loop(b, i64(2)) as half:
                start, count = group_at(half)
                with _loop(b, i64(2)) as side:
                    dim = b.add(b.mul(column, i64(TILE)), b.mul(side, i64(FACE)))
                    source = _face_source(b, variant, start, dim, args)
                    _face(b, variant, source, count, _Target.of(b, variant, unit, half, side, dim, target_stride))


@dataclass(frozen=True)
class _Target:
    """Where a face goes: its first row, the stride and bytes of its rows, and its exponents."""

    data: Value
    stride: Value
    row_bytes: int
    exponents: Value | None

    @classmethod
    def of(
        cls, b: Builder, variant: Variant, unit: Value, half: Value, side: Value, dim: Value, target_stride: Value
    ) -> _Target:
        if variant.rows:
            item = TILE_BYTES[variant.target] // TILE**2
            first = b.add(unit, b.mul(b.mul(half, i64(FACE)), target_stride))
            data = b.add(first, b.mul(dim, i64(item)))
            return cls(data, target_stride, FACE * item, None)
        block_float = variant.target in MANTISSA_BITS
        header = 4 * FACE if block_float else 0
        row_bytes = (TILE_BYTES[variant.target] - header) // (4 * FACE)
        face = b.add(b.mul(half, i64(2)), side)
        data = b.add(unit, b.add(b.mul(face, i64(FACE * row_bytes)), i64(header)))
        exponents = b.add(unit, b.mul(face, i64(FACE))) if block_float else None
        return cls(data, i64(row_bytes), row_bytes, exponents)


def _face_source(b: Builder, variant: Variant, start: Value, dim: Value, args: dict[str, Value]) -> FaceSource:
    if variant.interleave:
        left = b.lshr(dim, i64(1))
        right = b.add(left, b.lshr(args["head_dim"], i64(1)))
    else:
        left, right = dim, b.add(dim, i64(8))
    at = [b.add(start, b.mul(first, args["column_stride"])) for first in (left, right)]
    return FaceSource(at[0], at[1], args["row_stride"], args["column_stride"], variant.interleave)


def _face(b: Builder, variant: Variant, source: FaceSource, count: Value, target: _Target) -> None:
    """One face. Rows past `count` lie in the same page and may be read; they are overwritten with zeros."""
    with b.if_then(b.icmp_signed(">", count, i64(0))):
        element = I32 if variant.source == "float32" else I16
        rows = faces.load_face(b, variant.load, element, source)
        # line by line where rows can be had one at a time: loads and streaming stores share the same few buffers
        exponents: list[Value] = []
        first = 0
        per_store = FACE if variant.rows else LINE // target.row_bytes
        lines = iter(rows)
        while part := list(itertools.islice(lines, per_store)):
            data, shared = faces.encode_rows(b, part, variant.source, variant.target)
            exponents += shared
            if variant.rows:
                faces.store_rows(b, data, target.data, target.stride)
            else:
                faces.store_line(b, data, b.add(target.data, i64(first)), variant.streaming)
            first += LINE
        if target.exponents is not None:
            faces.store_exponents(b, exponents, target.exponents)
    _zero_rows(b, count, target.data, target.stride, i64(target.row_bytes))
    if target.exponents is not None:
        _zero_rows(b, count, target.exponents, i64(1), i64(1))


def _copy_rows(
    b: Builder,
    variant: Variant,
    source: Value,
    stride: Value,
    target: Value,
    target_stride: Value,
    count: Value,
    row_bytes: Value,
) -> None:
    """Copy `count` rows; a row is a whole number of cache lines (head_dim is a multiple of 32)."""
    with b.if_then(b.icmp_signed(">", count, i64(0))), _loop(b, count) as row:
        read, write = b.add(source, b.mul(row, stride)), b.add(target, b.mul(row, target_stride))
        with _loop(b, b.lshr(row_bytes, i64(6))) as line:
            at = b.mul(line, i64(LINE))
            faces.store(b, faces.load(b, b.add(read, at), I32, FACE), b.add(write, at), variant.streaming)


def _zero_rows(b: Builder, count: Value, target: Value, stride: Value, row_bytes: Value) -> None:
    """Zero rows `count`…15."""
    missing = b.sub(i64(FACE), count)
    with b.if_then(b.icmp_signed(">", missing, i64(0)), likely=False), _loop(b, missing) as row:
        at = b.add(target, b.mul(b.add(count, row), stride))
        with _loop(b, row_bytes) as byte:
            b.store(ir.Constant(I8, 0), b.inttoptr(b.add(at, byte), I8.as_pointer()))
