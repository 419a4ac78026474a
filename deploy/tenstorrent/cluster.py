"""Cluster descriptors of mock machines: what UMD would find out about the cards if there were any."""

from __future__ import annotations

#: sizes of the machines there are descriptors for
CHIPS = (1, 2, 4)

#: PCIe buses of the slots, and so the chips' trays: of a board that tt-metal knows, or it takes two for one
BUSES = (0x01, 0x41, 0x42, 0xC1)

#: a board's id holds its type in the bits from 36 on
P150A = 0x40

#: ethernet channels that join a p150 to the next, and to the one before: the two groups alternate round the ring
LINKS = (range(4, 8), range(8, 12))

#: what is fused off on a chip; a p150 has all its 140 cores and 8 DRAM banks
CHIP = """\
  {chip}:
    noc_translation: true
    harvest_mask: 0
    dram_harvesting_mask: 0
    eth_harvesting_mask: 288
    pcie_harvesting_mask: 2
    l2cpu_harvesting_mask: 0
"""


def descriptor(chips: int) -> str:
    """UMD's YAML for `chips` (1, 2 or 4) p150s, each in a slot of its own, cabled as a ring."""
    numbers = range(chips)
    neighbours = [(chip, (chip + 1) % chips) for chip in numbers][: chips if chips > 2 else chips - 1]
    cables = [
        f"  - [{{chip: {a}, chan: {channel}}}, {{chip: {b}, chan: {channel}}}]\n"
        for place, (a, b) in enumerate(neighbours)
        for channel in LINKS[place % 2]
    ]
    lines = [
        "arch:\n",
        *(f"  {chip}: blackhole\n" for chip in numbers),
        "chips: {}\n",
        "chip_unique_ids:\n",
        *(f"  {chip}: {1000 + chip}\n" for chip in numbers),
        "ethernet_connections:\n" if cables else "ethernet_connections: []\n",
        *cables,
        "ethernet_connections_to_remote_devices: []\n",
        "chips_with_mmio:\n",
        *(f"  - {chip}: {chip}\n" for chip in numbers),
        "io_device_type: PCIe\n",
        "harvesting:\n",
        *(CHIP.format(chip=chip) for chip in numbers),
        "chip_to_bus_id:\n",
        *(f"  {chip}: 0x{BUSES[chip]:04x}\n" for chip in numbers),
        "boards:\n",
        *(f"  - [{{board_id: {P150A << 36 | chip}}}, {{board_type: p150}}, {{chips: [{chip}]}}]\n" for chip in numbers),
        "asic_locations:\n",
        *(f"  {chip}: 0\n" for chip in numbers),
        "chip_pci_bdfs:\n",
        *(f"  {chip}: 0000:{BUSES[chip]:02x}:00.0\n" for chip in numbers),
    ]
    return "".join(lines)
