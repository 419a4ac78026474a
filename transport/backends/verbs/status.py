"""What the status of a completion means: the sentence that an error message carries."""

from __future__ import annotations

OK = 0
FLUSHED = 5
REMOTE_ACCESS = 10
RETRIES_EXCEEDED = 12
RECEIVER_NOT_READY = 13
REFUSALS = {9, REMOTE_ACCESS, 11}
"""Said by a queue pair that is in service: what was written is wrong. One that was fenced says nothing."""

#: `ibv_wc_status`: name, and what it says about a one-sided write
_STATUSES: dict[int, tuple[str, str]] = {
    0: ("success", "done"),
    1: ("local length error", "the request does not fit the queue pair: too many bytes, or too small a receive"),
    2: ("local queue pair error", "this side's NIC found the queue pair inconsistent"),
    3: ("local end-to-end context error", "this side's NIC found the context inconsistent"),
    4: ("local protection error", "the local buffer lies outside its registered region, or the region is gone"),
    5: ("flushed", "not executed: the queue pair failed or was reset before"),
    6: ("memory window error", "a memory window could not be bound"),
    7: ("bad response", "the peer's NIC answered with something unexpected"),
    8: ("local access error", "a protection error on this side while receiving"),
    9: ("remote invalid request", "the peer's NIC refused the kind or the length of the request"),
    10: ("remote access error", "the peer's NIC refused the write: a wrong or revoked rkey, or outside the region"),
    11: ("remote operation error", "the peer's NIC could not complete the request"),
    12: ("retries exceeded", "the peer did not answer: it is dead, unreachable, or has reset the queue pair"),
    13: ("receiver not ready", "the peer had no receive posted for the immediate"),
    14: ("reliable datagram violation", "not for this kind of queue pair"),
    15: ("remote invalid read request", "the peer's NIC refused a read"),
    16: ("remote aborted", "the peer aborted the operation"),
    17: ("invalid end-to-end context", "not for this kind of queue pair"),
    18: ("invalid context state", "not for this kind of queue pair"),
    19: ("fatal", "the NIC failed"),
    20: ("response timeout", "the peer's response did not come in time"),
    21: ("general error", "the NIC gave no reason"),
}


def describe(status: int) -> str:
    """ "status 12, retries exceeded: the peer did not answer ..."."""
    name, meaning = _STATUSES.get(status, ("unknown", "not a status that the verbs interface defines for writes"))
    return f"status {status}, {name}: {meaning}"
