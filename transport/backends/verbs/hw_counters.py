"""What a NIC counts itself: retries, refusals and bytes that no completion tells of. Read from /sys, by any process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transport.backends.verbs.sysfs import SYS

WORD_BYTES = 4
"""InfiniBand's port counters of data count words, whatever the link layer."""

_EVENTS: dict[str, tuple[str, ...]] = {
    "retries": ("local_ack_timeout_err", "packet_seq_err", "completer_retry_err", "to_retransmits", "retrans_pkts"),
    "retries_exceeded": ("retry_exceeded_err", "max_retry_exceeded", "unresponsive_remote_events"),
    "out_of_sequence": ("out_of_sequence", "out_of_seq_request", "rcvd_seq_err", "seq_err_naks_rcvd"),
    "duplicates": ("duplicate_request", "dup_req"),
    "receiver_not_ready": ("rnr_nak_retry_err", "rcvd_rnr_err", "rnr_naks_rcvd"),
    "receives_missing": ("out_of_buffer", "send_rnr_err"),
    "refused_by_peer": ("req_remote_access_errors", "remote_access_err"),
    "refused_here": ("resp_remote_access_errors", "res_rx_range_err"),
    "link_downed": ("link_downed",),
}
"""What happened → the names that it has with mlx5, rxe, bnxt_re and efa; a NIC has at most a few of them."""


def read(device: str, port: int, sys: Path = SYS) -> dict[str, int]:
    """Every counter of a port and of its device, by the kernel's name; empty if the device is gone or has none.

    They count from when the driver was loaded, for all processes, and may wrap.
    """
    base = sys / "class/infiniband" / device
    found: dict[str, int] = {}
    for folder in (base / "hw_counters", base / f"ports/{port}/counters", base / f"ports/{port}/hw_counters"):
        for file in sorted(folder.glob("*")):
            value = _number(file)
            if value is not None:
                found[file.name] = value
    return found


def events(nics: Iterable[tuple[str, int]], sys: Path = SYS) -> dict[str, int]:
    """`summary` of every (device, port), as `nic_<device>_<event>`: what a role's /metrics shows."""
    return {
        f"nic_{device}_{event}": count for device, port in nics for event, count in summary(device, port, sys).items()
    }


def summary(device: str, port: int, sys: Path = SYS) -> dict[str, int]:
    """The counters that say whether RDMA goes well, under names that do not depend on the NIC's maker.

    Only what the NIC has: "sent_bytes" and "received_bytes", "retries" (packets sent again), "retries_exceeded" (peers
    given up), "out_of_sequence", "duplicates", "receiver_not_ready" (an immediate that had to wait at the peer) and
    "receives_missing" (the same, seen by the peer), "refused_by_peer" and "refused_here" (writes that the key or the
    region did not allow), "link_downed". Where a NIC counts one thing in several counters, they are added.
    """
    counters = read(device, port, sys)
    found = {
        event: sum(counters[name] for name in names if name in counters)
        for event, names in _EVENTS.items()
        if any(name in counters for name in names)
    }
    for ours, theirs in (("sent_bytes", "port_xmit_data"), ("received_bytes", "port_rcv_data")):
        if theirs in counters:
            found[ours] = counters[theirs] * WORD_BYTES
    return found


def _number(file: Path) -> int | None:
    """None for what is no counter ("lifespan" takes writes), or cannot be read (a device that is being removed)."""
    if file.name == "lifespan":
        return None
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
