"""The writer's half of the handshake: from a socket path to mapped regions."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from transport import auth
from transport.backends.shm import wire
from transport.backends.shm.connection import handshake_context
from transport.backends.shm.control import SLOT_BYTES, words
from transport.errors import GeometryMismatch, ProtocolError, PushFailed, from_code
from transport.messages import PoolDescription, Writer

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a writer has after the handshake. `words`: uint64 [slots], read-only. `regions`: uint8 each."""

    words: np.ndarray
    regions: list[np.ndarray]


def shake_hands(sock: socket.socket, pool: PoolDescription, writer: Writer, token: str) -> Mapped:
    """Both sides prove the token, then the receiver's memory is mapped.

    Raises AuthenticationFailed, StaleGeneration (the receiver is another process by now), GeometryMismatch
    (its regions are not those of `pool`), ProtocolError, PushFailed (gone or silent).
    """
    opening = wire.Open(wire.VERSION, writer.worker, writer.generation, pool.worker, pool.generation, auth.nonce())
    try:
        sock.sendall(wire.pack(opening))
        challenge = _receive(sock, wire.Challenge)
        context = handshake_context(opening, challenge.nonce)
        sock.sendall(wire.pack(wire.Proof(auth.proof(token, "writer", *context))))
        welcome = _receive(sock, wire.Welcome)
        auth.check_proof(welcome.proof, token, "receiver", *context)
        expected = [region.length for region in ((pool.staging,) if pool.staging else pool.channels)]
        if welcome.lengths != expected or len(welcome.offsets) != len(expected):
            raise GeometryMismatch(
                f"pool {pool.worker} hands out regions of {welcome.lengths} bytes, its description says {expected}"
            )
        fds = _receive_descriptors(sock, 1 + len(expected))
    except TimeoutError:
        raise PushFailed(f"pool {pool.worker} does not answer on {pool.endpoint.address}") from None
    except OSError as error:
        raise PushFailed(f"connection to pool {pool.worker} broke during the handshake: {error}") from error
    try:
        control = mmap.mmap(fds[0], welcome.slots * SLOT_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        _private_to_process(control)
        regions = [
            _map(fd, offset, length)
            for fd, offset, length in zip(fds[1:], welcome.offsets, welcome.lengths, strict=True)
        ]
    except (OSError, ValueError) as error:
        raise PushFailed(f"cannot map the regions of pool {pool.worker}: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)
    return Mapped(words(control), regions)


def _map(fd: int, offset: int, length: int) -> np.ndarray:
    start = offset % mmap.ALLOCATIONGRANULARITY
    memory = mmap.mmap(fd, start + length, mmap.MAP_SHARED, offset=offset - start)
    _private_to_process(memory)
    return np.frombuffer(memory, np.uint8, length, start)


def _private_to_process(memory: mmap.mmap) -> None:
    """A forked child must not keep the right to write after its parent's connection has ended."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTFORK)


def _receive(sock: socket.socket, expected: type[P]) -> P:
    data = sock.recv(wire.MAX_PACKET)
    if not data:
        raise PushFailed("the receiver closed the connection during the handshake")
    packet = wire.unpack(data)
    if isinstance(packet, wire.Refused):
        raise from_code(packet.code, packet.message)
    if not isinstance(packet, expected):
        raise ProtocolError(f"{type(packet).__name__} instead of {expected.__name__} during the handshake")
    return packet


def _receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    try:
        while len(fds) < count:
            data, got, flags, _ = socket.recv_fds(sock, wire.MAX_PACKET, wire.FDS_PER_PACKET, socket.MSG_CMSG_CLOEXEC)
            fds.extend(got)
            if not data:
                raise PushFailed("the receiver closed the connection during the handshake")
            packet = wire.unpack(data)
            if flags & socket.MSG_CTRUNC or not isinstance(packet, wire.Descriptors) or packet.count != len(got):
                raise ProtocolError(f"expected descriptors, got {type(packet).__name__} with {len(got)} of them")
        return fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
