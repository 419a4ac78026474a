"""Rows of one tile: decoded to float32, or written, in each of the four KV dtypes.

Formats: `transport.geometry.kv` and `transport.geometry.tiles`. A row of a face (16 elements) is the unit:
it carries its own exponent in the block-float dtypes, so that writing a row touches no byte of another.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from decode_worker.engines.cpu.jit import kernel
from decode_worker.engines.cpu.vector import decode_unit, float_bits, pointer

#: how a kernel is told the dtype of the pool
KIND = {"float32": 0, "bfloat16": 1, "bfp8_b": 2, "bfp4_b": 3}

_FACES, _FACE_ROWS, _EXPONENTS = 4, 16, 64


@kernel()
def decode_tile(kind, address, out, column):
    """The tile at `address` → out[0:32, column:column + 32], float32, C-contiguous."""
    width, codes = out.shape[1], address + _EXPONENTS
    for unit in range(_FACES * _FACE_ROWS):
        face, row = unit // _FACE_ROWS, unit % _FACE_ROWS
        at = (face // 2 * 16 + row) * width + column + face % 2 * 16
        if kind == 0:
            decode_unit(address + unit * 64, 0, out, at, 32)
        elif kind == 1:
            decode_unit(address + unit * 32, 0, out, at, 16)
        elif kind == 2:
            decode_unit(codes + unit * 16, address + unit, out, at, 8)
        else:
            decode_unit(codes + unit * 8, address + unit, out, at, 4)


@kernel()
def _round_bfloat16(value):
    bits = float_bits(value)
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel()
def _block_float_code(value, shared, mantissa_bits):
    """sign << mantissa_bits | mantissa: aligned to the shared exponent by truncation, then rounded to nearest even."""
    bits = float_bits(value)
    exponent = np.int64((bits >> np.uint32(23)) & np.uint32(255))
    if exponent == 0:
        return np.uint8(0)
    aligned = (np.int64(bits & np.uint32(0x7FFFFF)) | np.int64(0x800000)) >> min(shared - exponent, 31)
    drop = 24 - mantissa_bits
    rounded = (aligned + (1 << (drop - 1)) - 1 + ((aligned >> drop) & 1)) >> drop
    magnitude = min(rounded, np.int64((1 << mantissa_bits) - 1))
    if magnitude == 0:
        return np.uint8(0)
    return np.uint8(np.int64(bits >> np.uint32(31)) << mantissa_bits | magnitude)


@kernel()
def _shared_exponent(row, at):
    largest = np.uint32(0)
    for i in range(16):
        largest = max(largest, (float_bits(row[at + i]) >> np.uint32(23)) & np.uint32(255))
    return np.int64(largest)


@kernel()
def encode_row(kind, address, token, row, column):
    """row[column:column + 32], float32 → row `token` (0…31) of the tile at `address`."""
    for half in range(2):
        unit = (token // 16 * 2 + half) * _FACE_ROWS + token % 16
        at = column + half * 16
        if kind == 0:
            floats = carray(pointer(address + unit * 64), (16,), np.float32)
            for i in range(16):
                floats[i] = row[at + i]
        elif kind == 1:
            halves = carray(pointer(address + unit * 32), (16,), np.uint16)
            for i in range(16):
                halves[i] = _round_bfloat16(row[at + i])
        else:
            exponent = _shared_exponent(row, at)
            carray(pointer(address + unit), (1,), np.uint8)[0] = exponent
            if kind == 2:
                codes = carray(pointer(address + _EXPONENTS + unit * 16), (16,), np.uint8)
                for i in range(16):
                    codes[i] = _block_float_code(row[at + i], exponent, 7)
            else:
                pairs = carray(pointer(address + _EXPONENTS + unit * 8), (8,), np.uint8)
                for i in range(8):
                    low = _block_float_code(row[at + 2 * i], exponent, 3)
                    high = _block_float_code(row[at + 2 * i + 1], exponent, 3)
                    pairs[i] = low | (high << 4)
