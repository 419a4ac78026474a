"""The link over TCP: addresses, what is said when they cannot be had or reached, and noticing a dead host."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from backend_harness import describe

from transport.backends.link import packets
from transport.backends.link.framing import Frames
from transport.backends.link.handshake import PacketSocket
from transport.backends.link.tcp import TcpListener, connect_tcp, join_address, split_address, tune
from transport.errors import ConfigurationError, PushFailed
from transport.messages import Endpoint, PoolDescription, Region


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(
    params=[
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")),
    ]
)
def listener(request: pytest.FixtureRequest) -> Iterator[TcpListener]:
    listener = TcpListener(request.param, 0)
    yield listener
    listener.close()


def pool_at(address: str) -> PoolDescription:
    return describe(
        "decode-0", "d1", [Region(address=0, rkey=0, length=4096)], Endpoint(backend="nixl", address=address)
    )


def accept(listener: TcpListener) -> socket.socket:
    listener.sock.setblocking(True)
    sock, _ = listener.sock.accept()
    return sock


@pytest.mark.parametrize(
    ("address", "parts"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("host:65535", ("host", 65535)), ("[fe80::1]:1", ("fe80::1", 1))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "::1:80", "host:http", "host:0", "host:65536", "h:-1"])
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|no port"):
        split_address(address)


def test_a_packet_goes_both_ways(listener: TcpListener) -> None:
    writer = connect_tcp(pool_at(listener.address), 5.0)
    receiver = PacketSocket(accept(listener), listener.framing())
    writer.send(packets.Challenge(b"to"))
    assert receiver.receive() == packets.Challenge(b"to")
    receiver.send(packets.Challenge(b"fro"))
    assert writer.receive() == packets.Challenge(b"fro")
    receiver.sock.close()
    assert writer.receive() is None
    writer.sock.close()


def test_the_address_names_the_port_that_was_had() -> None:
    listener = TcpListener("127.0.0.1", 0)
    port = listener.sock.getsockname()[1]
    assert port != 0
    assert listener.address == f"127.0.0.1:{port}"
    assert isinstance(listener.framing(), Frames)
    listener.close()


def test_a_taken_port_is_refused_by_name(listener: TcpListener) -> None:
    host, port = split_address(listener.address)
    with pytest.raises(ConfigurationError, match="in use") as refused:
        TcpListener(host, port)
    assert listener.address in str(refused.value)


def test_a_host_that_is_not_this_one_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0"):
        TcpListener("192.0.2.1", 0)


def test_a_port_is_taken_again_after_a_restart(listener: TcpListener) -> None:
    writer = connect_tcp(pool_at(listener.address), 5.0)
    accept(listener).close()  # this end closes first, so its port lingers
    writer.sock.close()
    listener.close()
    TcpListener(*split_address(listener.address)).close()


def test_nobody_listening_fails_by_name(listener: TcpListener) -> None:
    listener.close()
    with pytest.raises(PushFailed, match=r"cannot connect to pool decode-0 at .*refused"):
        connect_tcp(pool_at(listener.address), 5.0)


def test_a_bad_address_fails_by_name() -> None:
    with pytest.raises(PushFailed, match="cannot connect to pool decode-0 at /a/path"):
        connect_tcp(pool_at("/a/path"), 5.0)


def test_a_silent_receiver_is_not_waited_for_longer_than_said(listener: TcpListener) -> None:
    writer = connect_tcp(pool_at(listener.address), 0.05)
    with pytest.raises(TimeoutError):
        writer.receive()
    writer.sock.close()


def test_a_dead_host_is_noticed_in_about_ten_seconds(listener: TcpListener) -> None:
    """Both ends: probes after 5, 7, 9 and 11 s at the latest, sent data within 10 s."""
    writer = connect_tcp(pool_at(listener.address), 5.0).sock
    receiver = accept(listener)
    tune(receiver)
    for sock in (writer, receiver):
        tcp = {
            option: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"))
            for option in ("NODELAY", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
        }
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert tcp["NODELAY"]
        assert tcp["KEEPIDLE"] + tcp["KEEPINTVL"] * tcp["KEEPCNT"] <= 11
        assert tcp["USER_TIMEOUT"] <= 10_000
        sock.close()
