"""tt-kmd's ioctls as far as they are used here: numbers, argument layouts, and where windows and registers lie.

The layouts are facts of tt-kmd 2.10 (`ioctl.h`, `blackhole.c`, `memory.c`); sizes and offsets are checked in
`tests/unit/decode_worker/npu/test_kmd_abi.py` against what a C compiler makes of the header.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_uint8, c_uint16, c_uint32, c_uint64
from enum import IntEnum

_MAGIC = 0xFA

# The header's numbers carry neither direction nor size (`_IO`), so they are the same on every architecture.
GET_DEVICE_INFO = _MAGIC << 8 | 0
GET_DRIVER_INFO = _MAGIC << 8 | 5
ALLOCATE_TLB = _MAGIC << 8 | 11
FREE_TLB = _MAGIC << 8 | 12
CONFIGURE_TLB = _MAGIC << 8 | 13
EXPORT_TLB_DMABUF = _MAGIC << 8 | 16

MIB_2 = 2 << 20
GIB_4 = 4 << 30
"""The two sizes of a Blackhole's windows (`blackhole.c`): 202 small ones in BAR0, at most 8 big ones in BAR4."""

NUM_SMALL = 202
KERNEL_WINDOW = NUM_SMALL - 1
"""The last small window is the driver's own; nobody else ever owns its id."""
MAX_BIG = 8
"""As many as BAR4 has room for: ids 202, 203 …"""

REGISTERS = 0x1FC00000
"""Byte of BAR0, and so of a mapping at that offset of the device node, where the windows' registers begin."""
REGISTER_BYTES = 12

BLACKHOLE = (0x1E52, 0xB140)
"""PCI vendor and device."""


class Ordering(IntEnum):
    """How the card issues a window's accesses on its NOC (tt-umd, `types/tlb.hpp`)."""

    RELAXED = 0
    """Writes may pass each other; a read sees every write before it."""
    STRICT = 1
    """One after the other: slow."""
    POSTED = 2
    """Unacknowledged: a read by another way may miss writes that are still under way."""


class DeviceInfo(ctypes.Structure):
    """GET_DEVICE_INFO. The caller says how much of what follows `size` it has room for; the rest is cut off."""

    _fields_ = (
        ("room", c_uint32),
        ("size", c_uint32),
        ("vendor", c_uint16),
        ("device", c_uint16),
        ("subsystem_vendor", c_uint16),
        ("subsystem", c_uint16),
        ("bus_dev_fn", c_uint16),
        ("max_dma_buf_size_log2", c_uint16),
        ("pci_domain", c_uint16),
        ("reserved", c_uint16),
    )


class DriverInfo(ctypes.Structure):
    """GET_DRIVER_INFO; drivers before 2.0 fill in `api` alone."""

    _fields_ = (
        ("room", c_uint32),
        ("size", c_uint32),
        ("api", c_uint32),
        ("major", c_uint8),
        ("minor", c_uint8),
        ("patch", c_uint8),
        ("reserved", c_uint8),
    )


class AllocateTlb(ctypes.Structure):
    """ALLOCATE_TLB: `window_bytes` in, the rest out. The two offsets are for `mmap`: uncached, write-combining."""

    _fields_ = (
        ("window_bytes", c_uint64),
        ("reserved_in", c_uint64),
        ("id", c_uint32),
        ("reserved_id", c_uint32),
        ("mmap_uncached", c_uint64),
        ("mmap_combining", c_uint64),
        ("reserved_out", c_uint64),
    )


class FreeTlb(ctypes.Structure):
    _fields_ = (("id", c_uint32),)


class ConfigureTlb(ctypes.Structure):
    """CONFIGURE_TLB. `address`: a multiple of the window's size. `x_end`, `y_end`: the NOC node; the start
    coordinates and `mcast` are for multicast. `static_vc` stays 0 on Blackhole (tt-umd: a fault of the hardware).
    """

    _fields_ = (
        ("id", c_uint32),
        ("reserved_id", c_uint32),
        ("address", c_uint64),
        ("x_end", c_uint16),
        ("y_end", c_uint16),
        ("x_start", c_uint16),
        ("y_start", c_uint16),
        ("noc", c_uint8),
        ("mcast", c_uint8),
        ("ordering", c_uint8),
        ("linked", c_uint8),
        ("static_vc", c_uint8),
        ("reserved_bytes", c_uint8 * 3),
        ("reserved_words", c_uint32 * 2),
        ("reserved_out", c_uint64),
    )


class ExportTlbDmabuf(ctypes.Structure):
    """EXPORT_TLB_DMABUF. `argsz` must be this structure's size, `flags` 0; `offset` and `size` whole pages."""

    _fields_ = (
        ("argsz", c_uint32),
        ("flags", c_uint32),
        ("id", c_uint32),
        ("fd", c_int32),
        ("offset", c_uint64),
        ("size", c_uint64),
    )
