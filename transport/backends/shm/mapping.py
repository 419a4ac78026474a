"""The writer's share of the receiver's memory: descriptors off the socket, then mappings."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from dataclasses import dataclass

import numpy as np

from transport.backends.link import packets
from transport.backends.link.handshake import Offer, PacketSocket
from transport.backends.link.mapping import map_shared
from transport.backends.shm.control import SLOT_BYTES, words
from transport.errors import ProtocolError, PushFailed


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a writer has after the handshake. `words`: uint64 [slots], read-only. `regions`: uint8 each."""

    slots: int
    words: np.ndarray
    regions: list[np.ndarray]

    def close(self) -> None:
        """Mappings go with the last view of them."""


def take(link: PacketSocket, offer: Offer) -> Mapped:
    """Map what is offered; its descriptors follow on the socket. Raises ProtocolError, PushFailed."""
    if len(offer.details) != len(offer.lengths):
        raise ProtocolError(f"{len(offer.details)} offsets for {len(offer.lengths)} regions")
    fds = _receive_descriptors(link.sock, 1 + len(offer.lengths))
    try:
        control = mmap.mmap(fds[0], offer.slots * SLOT_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        _private_to_process(control)
        regions = [
            _map(fd, offset, length) for fd, offset, length in zip(fds[1:], offer.details, offer.lengths, strict=True)
        ]
    except (OSError, ValueError, TypeError) as error:
        raise PushFailed(f"cannot map the receiver's regions: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)
    return Mapped(offer.slots, words(control), regions)


def _map(fd: int, offset: object, length: int) -> np.ndarray:
    if not isinstance(offset, int):
        raise TypeError(f"{offset!r} is no offset")
    return map_shared(fd, offset, length)


def _private_to_process(memory: mmap.mmap) -> None:
    """A forked child must not keep the right to write after its parent's connection has ended."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)


def _receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    try:
        while len(fds) < count:
            data, got, flags, _ = socket.recv_fds(
                sock, packets.MAX_PACKET, packets.FDS_PER_PACKET, socket.MSG_CMSG_CLOEXEC
            )
            fds.extend(got)
            if not data:
                raise PushFailed("the receiver closed the connection during the handshake")
            packet = packets.unpack(data)
            if flags & socket.MSG_CTRUNC or not isinstance(packet, packets.Descriptors) or packet.count != len(got):
                raise ProtocolError(f"expected descriptors, got {type(packet).__name__} with {len(got)} of them")
        return fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
