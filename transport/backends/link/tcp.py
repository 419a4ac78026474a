"""The link over TCP, for backends that reach across hosts: where a receiver listens, and how a writer connects."""

from __future__ import annotations

import socket

from transport.backends.link.framing import Frames
from transport.backends.link.handshake import PacketSocket
from transport.errors import ConfigurationError, PushFailed
from transport.messages import PoolDescription

_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Seconds of silence before the first probe, between probes, and how many may stay unanswered."""
_USER_TIMEOUT_MS = 10_000
"""How long data that was sent may stay unacknowledged."""


def tune(sock: socket.socket) -> None:
    """Send packets at once, and notice within about ten seconds that the other host is dead or unreachable.

    A process that is merely stopped is not dead: its kernel answers the probes.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port` or `[IPv6 address]:port`. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not host:port, nor [IPv6 address]:port")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"{address!r}: there is no port {port}")
    return host[1:-1] if bracketed else host, int(port)


class TcpListener:
    """A listening TCP socket. `port` 0 takes a free one; `address` says which.

    Raises ConfigurationError if the address cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        wanted = join_address(host, port)
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self.sock = socket.socket(family, kind, protocol)
            try:
                # A restarted worker takes its port again though connections of the one before linger.
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.sock.bind(place)
                self.sock.listen(128)
            except BaseException:
                self.sock.close()
                raise
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"cannot listen on {wanted} for the data plane: {reason}") from error
        self.sock.setblocking(False)
        self.address = join_address(host, self.sock.getsockname()[1])

    def framing(self) -> Frames:
        return Frames()

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()


def connect_tcp(pool: PoolDescription, timeout_s: float) -> PacketSocket:
    """A connection to the pool's endpoint; `timeout_s` holds for the connecting and for each answer after it.

    Raises PushFailed.
    """
    where = pool.endpoint.address
    try:
        sock = socket.create_connection(split_address(where), timeout_s)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PushFailed(f"cannot connect to pool {pool.worker} at {where}: {reason}") from error
    try:
        tune(sock)
        if sock.getsockname() == sock.getpeername():
            # A free local port may be the very one that nobody listens on: TCP then connects to itself.
            raise PushFailed(f"cannot connect to pool {pool.worker} at {where}: nobody listens there")
    except BaseException:
        sock.close()
        raise
    return PacketSocket(sock, Frames())
