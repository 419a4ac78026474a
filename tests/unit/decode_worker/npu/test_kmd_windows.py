"""Ranges of banks through windows: big ones, small ones, tt-metal's; the bytes they show and who gets them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kmd_shim import Shim

from decode_worker.npu.tenstorrent.kmd.abi import GIB_4, MIB_2, Ordering
from decode_worker.npu.tenstorrent.kmd.held import decode
from decode_worker.npu.tenstorrent.kmd.windows import cover

ADDRESSES = st.integers(0, GIB_4 - 1)


@given(ADDRESSES, st.integers(1, 40 * MIB_2), st.sampled_from([MIB_2, GIB_4]))
def test_windows_cover_exactly_the_bytes(address: int, length: int, window: int) -> None:
    pieces = cover(address, length, window)
    at = address
    for piece in pieces:
        assert piece.base % window == 0
        assert 0 <= piece.offset < piece.offset + piece.length <= window
        assert piece.address == at
        at += piece.length
    assert at == address + length
    assert len(pieces) == (address + length - 1) // window - address // window + 1


@pytest.mark.parametrize(("address", "length"), [(0, 0), (-1, 4), (4, -1)])
def test_a_range_has_bytes(address: int, length: int) -> None:
    with pytest.raises(ValueError, match="a range has"):
        cover(address, length, MIB_2)


@given(st.integers(0, 63), st.integers(0, 63), st.integers(0, (1 << 32) - 1), st.sampled_from(Ordering))
def test_a_register_tells_where_its_window_points(x: int, y: int, page: int, ordering: Ordering) -> None:
    value = page | x << 32 | y << 38 | ordering << 59
    words = (value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF, value >> 64)
    assert decode(words) == (x, y, page * GIB_4, ordering)
    assert decode((words[0], words[1] | 1 << 26, words[2])) is None  # multicast


def test_whole_banks_in_big_windows_have_the_banks_own_addresses(shim: Shim) -> None:
    seen = shim.run("whole_banks", 8)
    assert seen["counts"] == {"devices": 1, "windows": 8, "exports": 8, "mappings": 0}
    assert seen["after"] == {"devices": 1, "windows": 0, "exports": 0, "mappings": 0}
    for bank, [mapping] in enumerate(seen["mappings"]):
        assert (mapping["bank"], mapping["offset"], mapping["length"]) == (bank, 0x100080, 4352)
    assert len({mapping["fd"] for [mapping] in seen["mappings"]}) == 8


def test_seven_banks_of_a_p100(shim: Shim) -> None:
    assert len(shim.run("whole_banks", 7)["mappings"]) == 7


@pytest.mark.parametrize("seed", [1, 2])
def test_a_nic_writes_exactly_the_ranges(shim: Shim, seed: int) -> None:
    own, some_taken, small = shim.several(
        *(("random_ranges", [seed + taken, 12, 3 * MIB_2], {"taken_big": taken}) for taken in (0, 5, 8))
    )
    assert own == 1, "windows that a range took at most"
    assert 1 < some_taken <= 4
    assert small == 4


def test_small_windows_where_the_big_ones_are_taken(shim: Shim) -> None:
    spans = [[0, MIB_2], [1, MIB_2], [5 * MIB_2 - 1, 2], [GIB_4 - 100, 100], [7, 0], [0, 7 * MIB_2]]
    cards = ({"taken_big": 8}, {"taken_big": 4}, {"big": 0})
    all_taken, some_taken, none_there = shim.several(*(("ranges", [spans], card) for card in cards))
    assert all_taken == none_there == [1, 2, 2, 1, 0, 7]
    assert some_taken == [1, 1, 1, 1, 0, 7]


def test_a_range_that_small_windows_cannot_hold(shim: Shim) -> None:
    kind, message = shim.refused("fill_up", [[0, GIB_4]], taken_big=8)
    assert kind == "NoWindows"
    assert "need 2048 windows of 2 MiB, of 201 that there are" in message
    assert "--kv-path relay" in message


def test_a_pools_region_is_one_window(shim: Shim) -> None:
    spans = [[0, MIB_2], [0, MIB_2 + 1]]
    kind, message = shim.refused("fill_up", spans, True, taken_big=8)
    assert kind == "NoWindows"
    assert "which make no single region" in message
    assert shim.run("ranges", [[0, MIB_2]] * 2, taken_big=8) == [1, 1]


def test_too_few_small_windows(shim: Shim) -> None:
    spans = [[0, 3 * MIB_2], [0, 3 * MIB_2]]
    kind, message = shim.refused("fill_up", spans, taken_big=8, taken_small=196)
    assert kind == "NoWindows"
    assert "bank 1's 6291456 bytes need 3 windows of 2 MiB, 2 were left" in message
    assert shim.run("ranges", spans, taken_big=8, taken_small=195) == [3, 3]


def test_the_windows_that_tt_metal_holds_in_this_process_are_used(shim: Shim) -> None:
    seen = shim.run("borrow", list(range(8)))
    assert seen["orderings"] == ["POSTED"] * 8
    assert seen["counts"] == {"devices": 2, "windows": 8, "exports": 8, "mappings": 0}
    assert seen["after"]["windows"] == 8, "they are still tt-metal's"


def test_own_windows_while_there_are_then_tt_metals(shim: Shim) -> None:
    seen = shim.run("borrow", [4, 5, 6, 7])
    assert seen["orderings"] == ["RELAXED"] * 4 + ["POSTED"] * 4
    assert seen["ports"] == [0] * 4 + [1] * 4, "which of the bank's ports"


def test_a_window_that_its_owner_may_point_elsewhere_is_left_alone(shim: Shim) -> None:
    kind, message = shim.refused("beside_windows_that_move")
    assert kind == "NoWindows"
    assert "all 4 GiB windows of /dev/tenstorrent/0 are taken" in message


def test_windows_of_other_descriptors_and_where_they_point(shim: Shim) -> None:
    found = shim.run("held_by_us")
    assert [(w["x"], w["y"], w["address"], w["id"]) for w in found] == [(17, 15, 0, 202), (17, 12, 0, 203)]


def test_a_pools_regions_are_what_a_nic_registers_and_a_peer_writes(shim: Shim) -> None:
    # Two NICs, eight channels, four tensors.
    assert shim.run("pool_over_a_nic", file="kmd_pool_program.py") == 64
