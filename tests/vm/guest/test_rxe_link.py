"""The guest itself: Soft-RoCE is there and names the address that the harness gave it."""

from __future__ import annotations

from pathlib import Path


def test_the_rdma_device_is_active() -> None:
    assert Path("/sys/class/infiniband/rxe0/ports/1/state").read_text() == "4: ACTIVE\n"
