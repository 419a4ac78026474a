"""Sizes, offsets and numbers of tt-kmd's ioctls, as a C compiler makes them of its header (2.10, x86-64)."""

from __future__ import annotations

import ctypes

import pytest

from decode_worker.npu.tenstorrent.kmd import abi


@pytest.mark.parametrize(
    ("layout", "size", "offsets"),
    [
        (abi.DeviceInfo, 24, {"vendor": 8, "bus_dev_fn": 16, "pci_domain": 20}),
        (abi.DriverInfo, 16, {"api": 8, "major": 12}),
        (abi.AllocateTlb, 48, {"id": 16, "mmap_uncached": 24, "mmap_combining": 32}),
        (abi.FreeTlb, 4, {"id": 0}),
        (abi.ConfigureTlb, 48, {"address": 8, "x_end": 16, "x_start": 20, "noc": 24, "ordering": 26, "static_vc": 28}),
        (abi.ExportTlbDmabuf, 32, {"id": 8, "fd": 12, "offset": 16, "size": 24}),
    ],
)
def test_layouts(layout: type[ctypes.Structure], size: int, offsets: dict[str, int]) -> None:
    assert ctypes.sizeof(layout) == size
    assert {name: getattr(layout, name).offset for name in offsets} == offsets


def test_numbers_have_no_size_or_direction() -> None:
    numbers = (abi.GET_DEVICE_INFO, abi.GET_DRIVER_INFO, abi.ALLOCATE_TLB, abi.FREE_TLB, abi.CONFIGURE_TLB)
    assert numbers == (0xFA00, 0xFA05, 0xFA0B, 0xFA0C, 0xFA0D)
    assert abi.EXPORT_TLB_DMABUF == 0xFA10
