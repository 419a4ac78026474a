"""A reliable connected queue pair: writes in one chain, an immediate behind them, and a way to cut it off."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transport.backends.verbs.address import Address
from transport.backends.verbs.completions import Completion, Completions
from transport.backends.verbs.nic import OpenNic, destroy, keep
from transport.backends.verbs.status import describe
from transport.backends.verbs.write_chain import Write
from transport.errors import ConfigurationError, Overloaded, PushFailed

log = logging.getLogger(__name__)

_HOPS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How patient a queue pair is. Raises ConfigurationError for endless or impossible values.

    A try takes 4.096 µs * 2^timeout, and a NIC may wait up to four times that (InfiniBand's rule for the timer).
    The first try and `retry_count` more: 15 and 6 make 134 ms * 7 = 0.94 s to 3.8 s until a dead peer is known.
    A receiver without a receive asks to wait `min_rnr_timer` (a code: 20 is 10.24 ms), `rnr_retry` times: 61 ms.
    """

    timeout: int = 15
    retry_count: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 20
    max_inline: int = 64
    """Bytes; writes up to this length are copied into the request, by the CPU: 0 where the source is a dma-buf or
    other memory that this process has not mapped. Less where the device has less."""
    service_level: int = 0
    traffic_class: int = 0
    """Of RoCE packets: DSCP * 4, for networks that tell lossless traffic by it."""

    def __post_init__(self) -> None:
        endless = "endless: a dead peer would never be noticed"
        for name, most in (("timeout", 31), ("retry_count", 7), ("rnr_retry", 7), ("min_rnr_timer", 31)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigurationError(f"{name}={value} is not within 0 to {most}")
        if self.timeout == 0:
            raise ConfigurationError(f"timeout=0 is {endless}; use 1 to 31")
        for name in ("retry_count", "rnr_retry"):
            if getattr(self, name) == 7:
                raise ConfigurationError(f"{name}=7 is {endless}; use 0 to 6")
        if not 0 <= self.service_level <= 15 or not 0 <= self.traffic_class <= 255 or self.max_inline < 0:
            raise ConfigurationError(f"{self}: a value is out of range")

    @property
    def detection_s(self) -> tuple[float, float]:
        """The shortest and the longest time in seconds after which a dead peer is known."""
        nominal = 4.096e-6 * 2**self.timeout * (self.retry_count + 1)
        return nominal, 4 * nominal


class QueuePair:
    """An RC queue pair, created ready to be connected (INIT). Thread-safe; no call blocks.

    `send_depth` and `receive_depth` are the most requests outstanding. Both are booked in `completions`, because all
    of them, also the unsignalled, complete when the queue pair fails; the room is free again at the first drain
    after its end. `receives` says how many receives are posted, `room` how many requests may be posted.

    Raises Overloaded if the completion queue has no room, ConfigurationError if the device has no such queue pair.
    """

    def __init__(
        self,
        nic: OpenNic,
        completions: Completions,
        *,
        send_depth: int,
        receive_depth: int,
        options: Options | None = None,
    ) -> None:
        if not 1 <= send_depth <= nic.max_send_wr or not 0 <= receive_depth <= nic.max_send_wr:
            raise ConfigurationError(
                f"send depth {send_depth} or receive depth {receive_depth} is not possible on {nic.nic.device}: "
                f"at most {nic.max_send_wr}, and at least one send"
            )
        self.nic = nic
        self.options = options or Options()
        self.send_depth = send_depth
        self.receive_depth = receive_depth
        self.receives = 0
        self._completions = completions
        self._lock = threading.Lock()
        self._signaled: deque[int] = deque()
        """How many requests each signalled one completes, itself included."""
        self._unsignaled = 0
        self._outstanding = 0
        self._connected = False
        self._broken = ""
        self._booked = send_depth + receive_depth
        completions.reserve(self._booked)
        try:
            self._qp, self.max_inline = self._create()
        except BaseException:
            completions.release(self._booked)
            raise
        self.qp_num: int = self._qp.qp_num
        local = nic.nic
        self.address = Address(self.qp_num, secrets.randbits(24), local.gid, local.lid, local.mtu)
        completions.listen(self.qp_num, self)
        nic.adopt(self, order=0)

    def _create(self) -> tuple[Any, int]:
        lib = self.nic.library
        inline = self.options.max_inline
        while True:
            cap = lib.qp.QPCap(
                max_send_wr=self.send_depth,
                max_recv_wr=max(1, self.receive_depth),
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=inline,
            )
            queue = self._completions.queue
            wanted = lib.qp.QPInitAttr(qp_type=lib.enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap, sq_sig_all=0)
            first = lib.qp.QPAttr(port_num=self.nic.nic.port)
            first.pkey_index = 0
            first.qp_access_flags = lib.enums.IBV_ACCESS_LOCAL_WRITE | lib.enums.IBV_ACCESS_REMOTE_WRITE
            try:
                qp = lib.qp.QP(self.nic.domain, wanted, first)
            except lib.error as error:
                if inline:  # more than this device has
                    inline = 0
                    continue
                raise ConfigurationError(
                    f"{self.nic.nic.device} gives no queue pair with {self.send_depth} sends and "
                    f"{self.receive_depth} receives: {error}"
                ) from error
            return qp, min(inline, int(wanted.max_inline_data))

    # ---- state

    @property
    def state(self) -> str:
        """ "init", "rtr", "rts", "err" and so on, as the device says; "reset" and "closed" are for good."""
        with self._lock:
            if self._broken in (_RESET, _CLOSED):
                return "reset" if self._broken == _RESET else "closed"
            enums = self.nic.library.enums
            names = {int(getattr(enums, f"IBV_QPS_{name}")): name.lower() for name in _STATES}
            attributes, _ = self._qp.query(enums.IBV_QP_STATE)
            return names.get(int(attributes.qp_state), "unknown")

    @property
    def room(self) -> int:
        """How many requests may be posted now."""
        return self.send_depth - self._outstanding

    def connect(self, peer: Address) -> None:
        """Join with the peer's queue pair (RTR, then RTS); path MTU is the smaller of both.

        On Ethernet the kernel may have to ask for the peer's MAC address first, which can take a second.
        Raises PushFailed if the device refuses, ConfigurationError if the two cannot reach each other.
        """
        lib, local = self.nic.library, self.nic.nic
        routed = local.gid_index is not None
        if not routed and not peer.lid:
            raise ConfigurationError(f"{local.device} is InfiniBand, but the peer's NIC has no LID: {peer}")
        route = (
            lib.addr.GlobalRoute(
                dgid=lib.addr.GID(ipaddress.IPv6Address(peer.gid).exploded),
                sgid_index=local.gid_index,
                hop_limit=_HOPS,
                traffic_class=self.options.traffic_class,
            )
            if routed
            else None
        )
        wanted = lib.qp.QPAttr(port_num=local.port, path_mtu=(min(local.mtu, peer.mtu) // 128).bit_length() - 1)
        wanted.ah_attr = lib.addr.AHAttr(
            dlid=peer.lid, sl=self.options.service_level, is_global=int(routed), port_num=local.port, gr=route
        )
        wanted.dest_qp_num = peer.qp_num
        wanted.rq_psn = peer.psn
        wanted.sq_psn = self.address.psn
        wanted.max_rd_atomic = wanted.max_dest_rd_atomic = 1
        wanted.min_rnr_timer = self.options.min_rnr_timer
        wanted.timeout = self.options.timeout
        wanted.retry_cnt = self.options.retry_count
        wanted.rnr_retry = self.options.rnr_retry
        with self._lock:
            qp = self._usable()
            try:
                qp.to_rts(wanted)
            except lib.error as error:
                raise PushFailed(f"{local.device} cannot connect to {peer}: {error}") from error
            self._connected = True

    # ---- work

    def post_receives(self, count: int) -> None:
        """Be ready for `count` more immediates. Raises Overloaded over `receive_depth`, PushFailed if broken."""
        with self._lock:
            qp = self._usable()
            if self.receives + count > self.receive_depth:
                raise Overloaded(
                    f"queue pair {self.qp_num} has {self.receives} of {self.receive_depth} receives posted, "
                    f"no room for {count}"
                )
            for _ in range(count):
                try:
                    qp.post_recv(self.nic.receive)
                except self.nic.library.error as error:
                    raise PushFailed(f"queue pair {self.qp_num} takes no receive: {error}") from error
                self.receives += 1

    def post(self, writes: Sequence[Write], *, wr_id: int, immediate: int | None = None, signaled: bool = True) -> None:
        """Post the writes as one chain, and behind them a zero-length write that carries `immediate` (32 bits).

        Each write is (local address, lkey, length, remote address, rkey). Only the last request is signalled, if
        `signaled`; when one fails, its completion and those of all behind it bear `wr_id`. Local memory may be
        reused after a signalled completion. Raises Overloaded if `room` is less than that, PushFailed if broken.
        """
        count = len(writes) + (immediate is not None)
        if not count:
            return
        with self._lock:
            qp = self._usable()
            if not self._connected:
                raise PushFailed(f"queue pair {self.qp_num} is not connected")
            if count > self.room:
                raise Overloaded(
                    f"queue pair {self.qp_num} has {self._outstanding} of {self.send_depth} requests outstanding "
                    f"({self._unsignaled} of them unsignalled), no room for {count}"
                )
            try:
                self.nic.chain.post(
                    qp, writes, wr_id=wr_id, immediate=immediate, signaled=signaled, max_inline=self.max_inline
                )
            except self.nic.library.error as error:
                self._broken = f"a post was refused: {error}"
                raise PushFailed(f"queue pair {self.qp_num}: {self._broken}") from error
            self._outstanding += count
            self._unsignaled += count
            if signaled:
                self._signaled.append(self._unsignaled)
                self._unsignaled = 0

    def completed(self, completion: Completion) -> None:
        """Count a completion of this queue pair; `Completions.drain` does so."""
        with self._lock:
            if completion.received:
                self.receives -= 1
            elif completion.ok:
                if self._signaled:
                    self._outstanding -= self._signaled.popleft()
            elif not self._broken:
                self._broken = describe(completion.status)

    # ---- the end

    def reset(self) -> None:
        """Cut the peer off: when this returns, the NIC executes no write for this queue pair any more. Idempotent.

        It cannot be connected again. Its number stays taken until `close`, so that no new queue pair hears a stale
        writer that goes on. The writer's requests end with status 12 after its retries; what is outstanding here
        never completes.

        Out of RTS, whatever arrives is dropped without an answer. The question is the packet being executed just
        then. A NIC moves to RESET by a command that it answers when the queue pair has stopped (mlx5 destroys queue
        pairs with that same command); ERR promises no such thing. Soft-RoCE (Linux 6.1) waits for nothing on the way
        to ERR, and on the way to RESET for the responder's tasklet only, though the first packet after a pause is
        executed outside it. Only destroying waits for both, so there it is destroyed; it gives numbers out in turn,
        and comes back to this one after a million.
        """
        with self._lock:
            if self._qp is None or self._broken == _RESET:
                return
            if self.nic.software:
                self._destroy(_RESET)
                return
            lib = self.nic.library
            try:
                self._qp.modify(lib.qp.QPAttr(qp_state=lib.enums.IBV_QPS_RESET), lib.enums.IBV_QP_STATE)
            except lib.error as error:
                log.warning("queue pair %d refuses to be reset (%s) and is destroyed", self.qp_num, error)
                self._destroy(_RESET)
                return
            self._broken = _RESET

    def close(self) -> None:
        """Destroy it; as strict as `reset`. Idempotent."""
        with self._lock:
            self._destroy(_CLOSED)

    def abandon(self) -> None:
        self._lock = threading.Lock()
        qp, self._qp = self._qp, None
        if qp is not None:
            self._broken = _CLOSED
            keep(qp)

    def _destroy(self, reason: str) -> None:
        qp, self._qp = self._qp, None
        if qp is None:
            return
        self._broken = reason
        self._completions.unlisten(self.qp_num)
        destroy(qp, f"queue pair {self.qp_num}")
        self._completions.release(self._booked)

    def _usable(self) -> Any:
        if self._qp is None or self._broken:
            raise PushFailed(f"queue pair {self.qp_num}: {self._broken}")
        return self._qp


_RESET = "it was reset"
_CLOSED = "it is closed"
_STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
