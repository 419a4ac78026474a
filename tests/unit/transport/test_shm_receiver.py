"""The shared-memory receiver: its socket, its handshake, and what it makes of peers that misbehave."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from backend_harness import TOKEN, WRITER, Events, Pool, ShmBackend, describe

from transport import auth
from transport.backends import connect
from transport.backends.link import packets
from transport.backends.link.framing import handshake_context
from transport.backends.shm import ShmReceiver
from transport.backends.shm import connect as shm_connect
from transport.errors import AuthenticationFailed, ConfigurationError, GeometryMismatch, PushFailed
from transport.messages import Endpoint, Region

PAGE = Region(address=0, rkey=0, length=4096)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[ShmBackend]:
    backend = ShmBackend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def pool(backend: ShmBackend) -> Pool:
    return await backend.pool()


class RawPeer:
    """Speaks the packets by hand."""

    def __init__(self, pool: Pool) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self.sock.connect(pool.description.endpoint.address)
        self.opening = packets.Open(
            packets.VERSION, "shm", WRITER.worker, WRITER.generation, "decode-0", "d1", auth.nonce()
        )

    async def send(self, packet: packets.Packet | bytes) -> None:
        await asyncio.to_thread(self.sock.send, packet if isinstance(packet, bytes) else packets.pack(packet))

    async def receive(self) -> packets.Packet | None:
        data = await asyncio.to_thread(self.sock.recv, packets.MAX_PACKET)
        return packets.unpack(data) if data else None

    async def join(self, side: str = "writer") -> packets.Packet | None:
        await self.send(self.opening)
        challenge = await self.receive()
        assert isinstance(challenge, packets.Challenge)
        await self.send(packets.Proof(auth.proof(TOKEN, side, *handshake_context(self.opening, challenge.nonce))))
        return await self.receive()


# ---- the socket ------------------------------------------------------------------------------------


def receiver_at(path: str | Path) -> ShmReceiver:
    return ShmReceiver("decode-0", "d1", TOKEN, [], Events(), str(path))


async def test_socket_and_directory_are_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "data.sock"
    receiver = receiver_at(path)
    await receiver.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await receiver.close()
    assert not path.exists()


async def test_the_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "data.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    receiver = receiver_at(path)
    await receiver.start()
    await receiver.close()


async def test_a_socket_in_use_is_left_alone(pool: Pool) -> None:
    path = pool.description.endpoint.address
    with pytest.raises(ConfigurationError, match="in use by another process"):
        await receiver_at(path).start()
    writer = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)
    writer.close()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigurationError, match="not a socket"):
        await receiver_at(path).start()
    assert path.read_text() == "data"


async def test_a_path_that_is_too_long_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="over 107 bytes"):
        await receiver_at(tmp_path / ("x" * 108)).start()


async def test_a_directory_that_all_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        await receiver_at(shared / "data.sock").start()


# ---- the handshake ---------------------------------------------------------------------------------


async def test_a_reflected_proof_is_refused(pool: Pool) -> None:
    """Knowing the receiver's proof is not knowing the token."""
    peer = RawPeer(pool)
    answer = await peer.join(side="receiver")
    assert isinstance(answer, packets.Refused)
    assert answer.code == "authentication_failed"
    assert pool.receiver.counters["refused_authentication_failed"] == 1


async def test_a_receiver_without_the_token_gets_no_writer(tmp_path: Path) -> None:
    """The proof goes both ways: a process that took over the socket path cannot make a writer store anywhere."""
    path = str(tmp_path / "false.sock")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(path)
    server.listen()
    description = describe("decode-0", "d1", [PAGE], Endpoint(backend="shm", address=path))
    writer = asyncio.create_task(asyncio.to_thread(connect, description, WRITER, TOKEN))
    peer, _ = await asyncio.to_thread(server.accept)
    peer.recv(packets.MAX_PACKET)
    peer.send(packets.pack(packets.Challenge(auth.nonce())))
    peer.recv(packets.MAX_PACKET)
    peer.send(packets.pack(packets.Welcome(b"\0" * auth.PROOF_BYTES, 16, [4096], [0])))
    with pytest.raises(AuthenticationFailed):
        await writer
    peer.close()
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"garbage",
        packets.pack(packets.Landed("a", 1, 1)),
        packets.pack(packets.Proof(b"x")),
        b"\x93\xa4Open\xc0\xc0",
    ],
)
async def test_garbage_before_the_handshake_is_refused(pool: Pool, data: bytes) -> None:
    peer = RawPeer(pool)
    await peer.send(data)
    assert isinstance(await peer.receive(), packets.Refused)
    assert await peer.receive() is None
    writer = await asyncio.to_thread(connect, pool.description, WRITER, TOKEN)  # others are served
    writer.close()


async def test_another_version_is_refused_by_name(pool: Pool) -> None:
    peer = RawPeer(pool)
    await peer.send(packets.Open(99, "shm", "p", "g", "decode-0", "d1", auth.nonce()))
    answer = await peer.receive()
    assert isinstance(answer, packets.Refused)
    assert "99" in answer.message


async def test_a_peer_that_says_nothing_is_dropped(tmp_path: Path) -> None:
    receiver = ShmReceiver("decode-0", "d1", TOKEN, [], Events(), str(tmp_path / "data.sock"), handshake_timeout_s=0.05)
    await receiver.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(10)
        peer.connect(str(tmp_path / "data.sock"))
        assert await asyncio.to_thread(peer.recv, 1) == b""
    assert receiver.counters["refused_handshake_timeout"] == 1
    await receiver.close()


async def test_other_regions_than_described_are_refused(pool: Pool) -> None:
    wrong = pool.description.model_copy(update={"channels": (PAGE,)})
    with pytest.raises(GeometryMismatch, match="4096"):
        await asyncio.to_thread(connect, wrong, WRITER, TOKEN)


async def test_a_silent_receiver_fails_the_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()
        description = describe("d", "g", [PAGE], Endpoint(backend="shm", address=path))
        with pytest.raises(PushFailed, match="does not answer"):
            await asyncio.to_thread(shm_connect, description, WRITER, TOKEN, timeout_s=0.1)


async def test_regions_may_share_a_descriptor_at_any_offset(tmp_path: Path) -> None:
    """A device may map all channels by one descriptor; 300 of them need more than one packet."""
    count, length = 300, 5000
    fd = os.memfd_create("all", os.MFD_CLOEXEC)
    os.ftruncate(fd, count * length)
    regions = [(Region(address=0, rkey=0, length=length), fd, index * length) for index in range(count)]
    path = str(tmp_path / "data.sock")
    receiver = ShmReceiver("decode-0", "d1", TOKEN, regions, Events(), path)
    await receiver.start()
    channels = [region for region, _, _ in regions]
    description = describe("decode-0", "d1", channels, Endpoint(backend="shm", address=path))
    before = len(os.listdir("/proc/self/fd"))
    writer = await asyncio.to_thread(connect, description, WRITER, TOKEN)
    assert len(os.listdir("/proc/self/fd")) < before + 5 + 2 * (count + 1)
    for index, region in enumerate(writer.regions):
        region[:] = index % 251
    memory = mmap.mmap(fd, count * length)
    assert all(memory[index * length : (index + 1) * length] == bytes([index % 251]) * length for index in range(count))
    writer.close()
    await receiver.close()
    os.close(fd)


async def test_a_writer_can_neither_change_nor_resize_what_it_must_not(pool: Pool) -> None:
    peer = RawPeer(pool)
    assert isinstance(await peer.join(), packets.Welcome)
    _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, peer.sock, packets.MAX_PACKET, 10)
    control, *regions = fds
    with pytest.raises(PermissionError):
        mmap.mmap(control, 64)
    for fd in fds:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)
    assert len(regions) == 2


# ---- after the handshake ---------------------------------------------------------------------------


@pytest.fixture
async def peer(pool: Pool) -> AsyncIterator[RawPeer]:
    peer = RawPeer(pool)
    assert isinstance(await peer.join(), packets.Welcome)
    assert isinstance(await peer.receive(), packets.Descriptors)
    await pool.events.wait()
    yield peer
    peer.sock.close()


async def test_case_05_unknown_messages_are_counted_and_answered(pool: Pool, peer: RawPeer) -> None:
    await peer.send(packets.RevokeAck("nobody's", 1))
    await peer.send(packets.Aborted("nobody's", 1, "why"))
    await peer.send(packets.Landed("nobody's", 1, 100))
    assert await peer.receive() == packets.Revoke("nobody's", 1)
    for counter in ("unknown_acks", "unknown_aborts", "unknown_landed"):
        assert pool.receiver.counters[counter] == 1
    assert pool.events.queue.empty()


async def test_case_05_another_slot_than_granted_is_not_the_lease(pool: Pool, peer: RawPeer) -> None:
    lease = pool.grant("a")
    await peer.send(packets.Landed("a", lease.slot + 1, 100))
    assert await peer.receive() == packets.Revoke("a", lease.slot + 1)
    assert pool.events.queue.empty()


async def test_landed_that_crosses_a_fence_ends_the_fence_and_nothing_lands(pool: Pool, peer: RawPeer) -> None:
    lease = pool.grant("a")
    fence = asyncio.create_task(pool.receiver.fence("a"))
    assert await peer.receive() == packets.Revoke("a", lease.slot)
    await peer.send(packets.Landed("a", lease.slot, 100))
    await asyncio.wait_for(fence, 10)
    assert pool.receiver.counters["late_landed"] == 1
    assert pool.events.queue.empty()


@pytest.mark.parametrize("data", [b"garbage", packets.pack(packets.Proof(b"x")), packets.pack(packets.Challenge(b"x"))])
async def test_garbage_after_the_handshake_still_needs_the_writers_end(pool: Pool, peer: RawPeer, data: bytes) -> None:
    """The writer has the memory mapped: its leases are fenced only when its end of the connection closes."""
    pool.grant("a")
    await peer.send(data)
    assert await peer.receive() is None  # asked to go
    fence = asyncio.create_task(pool.receiver.fence("a"))
    done, _ = await asyncio.wait([fence], timeout=0.2)
    assert not done
    peer.sock.close()
    await asyncio.wait_for(fence, 10)
    assert await pool.events.wait() == ("writer_lost", WRITER)


async def test_landing_twice_is_a_protocol_error(pool: Pool, peer: RawPeer) -> None:
    lease = pool.grant("a")
    for _ in range(2):
        await peer.send(packets.Landed("a", lease.slot, 1))
    assert await peer.receive() is None
    assert await pool.events.wait() == ("landed", "a")
    assert pool.events.queue.empty()


async def test_an_owner_that_fails_does_not_break_the_data_plane(pool: Pool, peer: RawPeer) -> None:
    def broken(lease_id: str) -> None:
        raise RuntimeError("owner's bug")

    pool.events.landed = broken  # type: ignore[method-assign]
    lease = pool.grant("a")
    await peer.send(packets.Landed("a", lease.slot, 1))
    await peer.send(packets.Landed("b", 1, 1))
    assert await peer.receive() == packets.Revoke("b", 1)
