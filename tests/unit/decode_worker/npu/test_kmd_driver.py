"""One device of tt-kmd: windows, their mappings and dma-bufs, the order of closing, and every refusal by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from kmd_shim import LEFT_OPEN, Shim

from decode_worker.npu.tenstorrent.kmd.abi import GIB_4, MIB_2, Ordering
from decode_worker.npu.tenstorrent.kmd.errors import holders
from decode_worker.npu.tenstorrent.kmd.probe import devices


def test_the_driver_tells_its_version_and_where_the_card_is(shim: Shim) -> None:
    told, old, wormhole = shim.several(
        ("versions", [], {}), ("versions", [], {"minor": 9}), ("versions", [], {"device": "401e"})
    )
    assert told == {"version": "2.10.1", "pci": "0000:01:00.0", "blackhole": True, "export": True}
    assert (old["version"], old["export"]) == ("2.9.1", False)
    assert wormhole["blackhole"] is False


def test_a_window_shows_the_bank_that_it_points_at(shim: Shim) -> None:
    places = [(MIB_2, 2 * MIB_2), (MIB_2, GIB_4 - MIB_2), (GIB_4, 0)]
    for open_now in shim.several(*(("show_a_bank", list(place), {}) for place in places)):
        assert open_now == {"devices": 1, "windows": 1, "exports": 1, "mappings": 1}
    for _, address in places:
        assert shim.bank(3, address + 100, 4) == b"host"
        assert shim.bank(3, address + 4097, 3) == b"nic"


def test_windows_for_a_nic_are_relaxed(shim: Shim) -> None:
    small, big = shim.several(("ordering_of", [MIB_2], {}), ("ordering_of", [GIB_4], {}))
    assert small == big == Ordering.RELAXED


def test_a_nic_reaches_what_was_exported_of_a_window_and_nothing_else(shim: Shim) -> None:
    assert shim.run("export_piecewise") == [0, 0, errno.ERANGE, errno.ERANGE]
    assert shim.bank(0, 8191, 4098) == b"\0a" + 4094 * b"\0" + b"z\0"


def test_sizes_addresses_and_pages_are_checked_before_the_driver_is_asked(shim: Shim) -> None:
    assert len(shim.run("bad_arguments")) == 8


def test_a_window_that_an_array_shows_is_not_given_back(shim: Shim) -> None:
    outcome = shim.run("mapping_in_use")
    assert "WindowInUse" in outcome["message"]
    assert "free the arrays" in outcome["message"]
    assert (outcome["meanwhile"], outcome["after"]) == (1, 0)


def test_a_forked_child_does_not_hold_a_window(shim: Shim) -> None:
    assert shim.run("fork_beside_a_mapping") == [True, False]


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("leave_a_window", "left: 1 devices, 1 windows"),
        ("close_the_device_first", "still allocated when its device was closed"),
        ("free_before_the_export", "freed while exported"),
        ("close_before_the_nic", "closed while a NIC has it registered"),
    ],
)
def test_the_played_driver_sees_leaks_and_wrong_orders(shim: Shim, program: str, complaint: str) -> None:
    done = shim.start(program)
    assert done.returncode == LEFT_OPEN
    assert complaint in done.stderr


# ---- refusals


def fail(call: str, code: int, after: int = 1) -> dict[str, str]:
    return {"fail": f"{call}={code}@{after}"}


def test_a_device_that_cannot_be_opened(shim: Shim) -> None:
    expected = {
        errno.ENOENT: ("NoNpuDevice", "modprobe tenstorrent"),
        errno.EACCES: ("NpuAccessDenied", "--device /dev/tenstorrent/0"),
        errno.EAGAIN: ("NpuBusy", "stop it"),
        errno.ENODEV: ("NpuGone", "tt-smi -r"),
        errno.EIO: ("NpuDriverError", "EIO"),
    }
    outcomes = shim.several(*(("open_path", ["/dev/tenstorrent/0"], fail("open", code)) for code in expected))
    for (kind, todo), (got, message) in zip(expected.values(), outcomes, strict=True):
        assert (got, todo in message) == (kind, True), message


def test_a_card_that_does_not_exist(shim: Shim) -> None:
    kind, message = shim.refused("open_path", "/dev/tenstorrent/7")
    assert kind == "NoNpuDevice"
    assert "/dev/tenstorrent/7" in message


def test_what_the_driver_refuses_has_a_name_and_a_remedy(shim: Shim) -> None:
    expected = {
        ("info", errno.ENODEV): ("NpuGone", "restart the worker"),
        ("version", errno.ENODEV): ("NpuGone", "restart the worker"),
        ("allocate_big", errno.ENOMEM): ("NoWindows", "--kv-path relay"),
        ("allocate_big", errno.ENOSPC): ("NoWindows", "stop the process"),
        ("allocate_big", errno.ENODEV): ("NpuGone", "restart the worker"),
        ("configure", errno.EINVAL): ("NpuDriverError", "point 4 GiB window 202 at 0x0 of (17, 14)"),
        ("configure", errno.EPERM): ("NpuDriverError", "does not belong to this descriptor"),
        ("export", errno.EOPNOTSUPP): ("ExportUnsupported", "upgrade the kernel"),
        ("export", errno.ENODEV): ("NpuGone", "restart the worker"),
        ("export", errno.EMFILE): ("NpuDriverError", "ulimit -n"),
        ("export", errno.ENOMEM): ("NpuDriverError", "ENOMEM"),
    }
    outcomes = shim.several(
        *(("fill_up", [[[0, 4096]] * 8], fail(*refusal) | {"taken_small": 201}) for refusal in expected)
    )
    for (kind, todo), (got, message) in zip(expected.values(), outcomes, strict=True):
        assert (got, todo in message) == (kind, True), message


def test_an_export_that_fails_halfway_leaves_nothing_open(shim: Shim) -> None:
    # The first time is the question whether it can be done at all, which is answered before any window is taken.
    kind, message = shim.refused("fill_up", [[0, 4096]] * 8, **fail("export", errno.ENOMEM, 6))
    assert kind == "NpuDriverError"
    assert "export 4 GiB window 206" in message


def test_a_signal_while_the_driver_waits_is_no_failure(shim: Shim) -> None:
    assert shim.run("ordering_of", MIB_2, **fail("allocate", errno.EINTR)) == Ordering.RELAXED


def test_a_window_that_cannot_be_mapped(shim: Shim) -> None:
    kind, message = shim.refused("show_a_bank", MIB_2, 0, **fail("mmap", errno.ENOMEM))
    assert kind == "NpuDriverError"
    assert "cannot map 2 MiB window 0" in message


def test_a_driver_before_2_10_is_told_from_a_kernel_before_5_8(shim: Shim) -> None:
    kind, message = shim.refused("fill_up", [[0, 4096]], minor=9)
    assert kind == "DriverTooOld"
    assert "tt-kmd 2.9.1" in message
    assert "upgrade tt-kmd to 2.10" in message
    kind, message = shim.refused("fill_up", [[0, 4096]], major=0, minor=0)
    assert kind == "DriverTooOld"
    assert "tt-kmd from before 2.0" in message


def test_a_window_that_stays_mapped_elsewhere(shim: Shim) -> None:
    # By a forked child, say. The device is closed all the same, with which the driver takes the window back.
    done = shim.start("stuck_window", **fail("free", errno.EBUSY))
    assert "WindowInUse: cannot free 2 MiB window 0: it is still mapped" in done.stdout
    assert "0 devices are open" in done.stdout
    assert done.returncode == LEFT_OPEN


def test_a_closed_device_is_no_longer_asked(shim: Shim) -> None:
    done = shim.start("use_closed")
    assert "ConfigurationError: /dev/tenstorrent/0 is closed" in done.stderr


def test_a_card_without_big_windows(shim: Shim) -> None:
    kind, message = shim.refused("open_and_allocate", GIB_4, big=0)
    assert kind == "NoWindows"
    assert "Resizable BAR" in message


def test_the_processes_that_have_a_device_open(tmp_path: Path) -> None:
    (tmp_path / "driver/tenstorrent/3").mkdir(parents=True)
    (tmp_path / "driver/tenstorrent/3/pids").write_text(f"77\n{os.getpid()}\n77\n")
    (tmp_path / "77").mkdir()
    (tmp_path / "77/comm").write_text("python3\n")
    assert (77, "python3") in holders("/dev/tenstorrent/3", tmp_path)
    assert len(holders("/dev/tenstorrent/3", tmp_path)) == 2
    assert holders("/dev/tenstorrent/4", tmp_path) == []


# ---- looking only


def test_a_look_says_what_is_free_and_takes_nothing(shim: Shim, tmp_path: Path) -> None:
    pci = tmp_path / "bus/pci/devices/0000:01:00.0"
    pci.mkdir(parents=True)
    (tmp_path / "module/tenstorrent").mkdir(parents=True)
    (tmp_path / "module/tenstorrent/version").write_text("2.10.1\n")
    lines = ["0x0 0x0 0x0"] * 4 + [f"{0x8000000000:#x} {0x8000000000 + 8 * GIB_4 - 1:#x} 0x14220c"]
    (pci / "resource").write_text("\n".join(lines) + "\n")
    seen = shim.run("look", True, str(tmp_path), "/proc", taken_big=3, taken_small=200)
    assert seen["free_windows"] == {str(GIB_4): 5, str(MIB_2): 1}
    assert seen["big_windows"] == 8
    assert seen["module_version"] == "2.10.1"
    assert seen["version"] == [2, 10, 1]
    assert (seen["supports_export"], seen["export_problem"], seen["problem"]) == (True, None, None)
    assert seen["after"] == {"devices": 0, "windows": 0, "exports": 0, "mappings": 0}


def test_the_cards_of_a_machine(tmp_path: Path) -> None:
    assert devices(tmp_path / "none") == []
    for name in ("10", "2", "by-id"):
        (tmp_path / name).touch()
    assert devices(tmp_path) == [str(tmp_path / "2"), str(tmp_path / "10")]


def test_a_look_without_counting_allocates_nothing(shim: Shim) -> None:
    seen = shim.run("look", False, "/sys", "/proc", **fail("allocate", errno.EIO))
    assert (seen["free_windows"], seen["problem"], seen["supports_export"]) == (None, None, True)


def test_a_look_tells_what_is_wrong(shim: Shim) -> None:
    wrong = [
        (fail("open", errno.EACCES), "problem", "--device"),
        (fail("info", errno.ENODEV), "problem", "restart"),
        ({"minor": 3}, "export_problem", "2.10 or newer"),
        (fail("export", errno.EOPNOTSUPP), "export_problem", "upgrade the kernel"),
        (fail("allocate", errno.EIO), "problem", "EIO"),
    ]
    looks = shim.several(*(("look", [True, "/sys", "/proc"], environment) for environment, _, _ in wrong))
    for (_, field, todo), seen in zip(wrong, looks, strict=True):
        assert todo in seen[field]
        assert seen["supports_export"] is False
