"""vLLM's KV tensors as the kernels read them: numpy views, no copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from prefill_worker.control.messages import LocalKV
from transport.errors import ConfigurationError
from transport.geometry.floats import SourceDtype
from transport.geometry.pages import Packing, PageLayout
from transport.kernels.source import Source

_DTYPES: dict[torch.dtype, SourceDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def local_kv(kv_caches: Mapping[str, torch.Tensor]) -> LocalKV:
    """Shape of the cache; `kv_caches`: layer name → logical `[B, H, N, 2D]`.

    Raises ConfigurationError for caches that cannot be pushed (other dtypes, other shapes, not on the CPU).
    """
    shapes = {(tuple(pages.shape), pages.dtype, pages.device.type) for pages in kv_caches.values()}
    if len(shapes) != 1:
        raise ConfigurationError(
            f"all layers must have KV caches of one kind, this model has {sorted(map(str, shapes))}"
        )
    ((shape, dtype, device),) = shapes
    if device != "cpu":
        raise ConfigurationError(f"KV caches on {device} cannot be pushed by this build, only those on cpu")
    if dtype not in _DTYPES or len(shape) != 4:
        raise ConfigurationError(f"KV caches of shape {shape} and dtype {dtype} cannot be pushed")
    blocks, heads, size, width = shape
    return LocalKV(
        num_layers=len(kv_caches),
        num_kv_heads=heads,
        head_dim=width // 2,
        block_size=size,
        num_blocks=blocks,
        dtype=_DTYPES[dtype],
    )


def source(kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> Source:
    """The pages as a kernel source; `layers`: vLLM's attention layers by name.

    How the CPU backend packs its pages depends on the host's instruction set and is known once a forward ran.
    Raises ConfigurationError for a packing that no kernel reads.
    """
    kv = local_kv(kv_caches)
    name = next(iter(kv_caches))
    isa = str(getattr(layers[name], "isa", ""))
    packings: dict[str, Packing] = {"amx": "amx", "vec": "vec", "vec16": "vec"}
    if isa not in packings:
        raise ConfigurationError(f"KV pages packed for {isa!r} cannot be read, only {sorted(packings)}")
    layout = PageLayout(kv.num_kv_heads, kv.head_dim, kv.block_size, packing=packings[isa], dtype=kv.dtype)
    return Source([_array(pages) for pages in in_order(kv_caches)], layout)


def in_order(kv_caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors by layer number, whatever order they were registered in."""
    return [kv_caches[name] for name in sorted(kv_caches, key=_layer_number)]


def _layer_number(name: str) -> int:
    """`model.layers.7.self_attn.attn` → 7."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigurationError(f"cannot tell the layer number of {name!r}")
    return numbers[0]


def _array(pages: torch.Tensor) -> np.ndarray:
    if pages.dtype != torch.float32:
        pages = pages.view(torch.uint16)  # numpy has no bf16
    return pages.numpy()
