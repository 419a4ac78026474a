"""32x32 tiles in the four dtypes of the NPU, in numpy: values → bytes and back.

A tile is four 16x16 faces (top left, top right, bottom left, bottom right), row-major inside. Block floats
begin with 64 exponent bytes, one per face row of 16 elements, then the mantissas (facts checked against ttnn).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from transport.geometry.floats import SourceDtype, to_bfloat16, to_float32
from transport.geometry.kv import FACE, TILE, TILE_BYTES, KVDtype

#: mantissa bits (hidden bit included) of the block floats
MANTISSA_BITS: dict[KVDtype, int] = {"bfp8_b": 7, "bfp4_b": 3}

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def to_faces(tiles: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[…, 32, 32] → […, 4, 16, 16], faces TL, TR, BL, BR."""
    split = tiles.reshape(*tiles.shape[:-2], 2, FACE, 2, FACE)
    return split.swapaxes(-3, -2).reshape(*tiles.shape[:-2], 4, FACE, FACE)


def from_faces(faces: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[…, 4, 16, 16] → […, 32, 32]."""
    split = faces.reshape(*faces.shape[:-3], 2, 2, FACE, FACE)
    return split.swapaxes(-3, -2).reshape(*faces.shape[:-3], TILE, TILE)


def encode(values: npt.NDArray[np.generic], source: SourceDtype, dtype: KVDtype) -> Bytes:
    """[…, 32, 32] in storage of `source` → uint8 […, tile bytes of `dtype`].

    Equal source and target formats keep every bit, NaNs included; otherwise round to nearest even.
    """
    faces = np.ascontiguousarray(to_faces(values))
    if dtype in MANTISSA_BITS:
        return _encode_block_float(to_float32(faces, source), MANTISSA_BITS[dtype])
    out: npt.NDArray[np.generic]
    if dtype == source:
        out = faces
    elif dtype == "float32":
        out = to_float32(faces, source)
    else:
        out = to_bfloat16(to_float32(faces, source))
    return np.ascontiguousarray(out).view(np.uint8).reshape(*values.shape[:-2], TILE_BYTES[dtype])


def decode(data: Bytes, dtype: KVDtype) -> Floats:
    """uint8 […, tile bytes] → float32 […, 32, 32]; exact."""
    data = np.ascontiguousarray(data)
    faces = (*data.shape[:-1], 4, FACE, FACE)
    if dtype in MANTISSA_BITS:
        values = _decode_block_float(data, MANTISSA_BITS[dtype])
    elif dtype == "float32":
        values = data.view(np.float32)
    else:
        values = to_float32(data.view(np.uint16), "bfloat16")
    return np.ascontiguousarray(from_faces(values.reshape(faces)), np.float32)


def _encode_block_float(faces: Floats, mantissa_bits: int) -> Bytes:
    """[…, 4, 16, 16] → […, bytes]: the largest exponent of each face row is shared.

    As tt-metal does it: mantissas are aligned by a truncating shift, then rounded to nearest even and
    clamped; subnormals are 0, and a zero mantissa has no sign.
    """
    bits = faces.view(np.uint32)
    exponent = (bits >> np.uint32(23)) & np.uint32(0xFF)
    shared = exponent.max(axis=-1, keepdims=True)
    mantissa = np.where(exponent == 0, np.uint32(0), (bits & np.uint32(0x7FFFFF)) | np.uint32(0x800000))
    mantissa >>= np.minimum(shared - exponent, np.uint32(31))
    drop = np.uint32(24 - mantissa_bits)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    rounded = (mantissa + half + ((mantissa >> drop) & np.uint32(1))) >> drop
    rounded = np.minimum(rounded, np.uint32((1 << mantissa_bits) - 1))
    sign = np.where(rounded == 0, np.uint32(0), bits >> np.uint32(31))
    codes = ((sign << np.uint32(mantissa_bits)) | rounded).astype(np.uint8)
    flat = codes.reshape(*faces.shape[:-3], -1)
    if mantissa_bits == 3:
        flat = flat[..., 0::2] | (flat[..., 1::2] << np.uint8(4))
    exponents = shared.astype(np.uint8).reshape(*faces.shape[:-3], -1)
    return np.concatenate([exponents, flat], axis=-1)


def _decode_block_float(data: Bytes, mantissa_bits: int) -> Floats:
    rows = 4 * FACE
    shared, codes = data[..., :rows], data[..., rows:]
    if mantissa_bits == 3:
        codes = np.stack([codes & np.uint8(0xF), codes >> np.uint8(4)], axis=-1)
    codes = codes.reshape(*data.shape[:-1], rows, FACE)
    magnitude = (codes & np.uint8((1 << mantissa_bits) - 1)).astype(np.float32)
    signed = np.where(codes >> np.uint8(mantissa_bits), -magnitude, magnitude)
    scale = shared[..., None].astype(np.int32) - np.int32(127 + mantissa_bits - 1)
    with np.errstate(over="ignore"):  # infinities share exponent 255
        values: Floats = np.ldexp(signed, scale).astype(np.float32)
    return values
