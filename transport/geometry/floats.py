"""Element formats as numpy can hold them: float32 as such, bf16 and fp16 as uint16 bits."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

SourceDtype = Literal["float32", "bfloat16", "float16"]

#: what a NaN becomes in bf16, whatever its sign and payload: as ttnn does it
BFLOAT16_NAN = 0x7FC0

ITEM_BYTES: dict[SourceDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def storage_dtype(dtype: SourceDtype) -> np.dtype[np.generic]:
    """The numpy dtype that holds elements of `dtype`."""
    return np.dtype(np.float32) if dtype == "float32" else np.dtype(np.uint16)


def to_float32(values: npt.NDArray[np.generic], dtype: SourceDtype) -> npt.NDArray[np.float32]:
    """Storage of `dtype` (any shape) → float32; exact, but fp16 NaNs come out quiet, as the hardware makes them."""
    if dtype == "float32":
        return values.astype(np.float32, copy=False)
    if dtype == "float16":
        wide = values.view(np.float16).astype(np.float32).view(np.uint32)
        is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, wide | np.uint32(0x400000), wide).view(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 → bf16 bits, round to nearest even; every NaN becomes BFLOAT16_NAN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(BFLOAT16_NAN), rounded).astype(np.uint16)


def from_float32(values: npt.NDArray[np.float32], dtype: SourceDtype) -> npt.NDArray[np.generic]:
    """float32 → storage of `dtype`, round to nearest even."""
    if dtype == "float32":
        return values.astype(np.float32, copy=False)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return to_bfloat16(values)
