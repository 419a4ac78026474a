"""A completion queue that an event loop can wait for, and that its users cannot overrun."""

from __future__ import annotations

import select
import socket
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from transport.backends.verbs.descriptors import create_with_descriptor
from transport.backends.verbs.nic import RECEIVED, OpenNic, blind, destroy, keep
from transport.backends.verbs.status import OK
from transport.errors import ConfigurationError, Overloaded, WorkerLost

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one work request.

    `wr_id`: as posted, or RECEIVED. `status`: 0, or see `status.describe`. `opcode` (an `ibv_wc_opcode`) and
    `immediate` (in host order) mean something only when `ok`.
    """

    wr_id: int
    status: int
    ok: bool
    opcode: int
    qp_num: int
    immediate: int | None

    @property
    def received(self) -> bool:
        """The peer's immediate has come, behind its writes; False for what this side posted."""
        return self.wr_id == RECEIVED


class Listener(Protocol):
    """A queue pair: hears of its own completions, and is closed before its queue."""

    def completed(self, completion: Completion) -> None: ...

    def close(self) -> None: ...


class Completions:
    """A completion queue with its completion channel. Thread-safe; never blocks.

    Wait for `fd` to be readable (select, poll, `loop.add_reader`), then `drain()`. A queue that overflows takes all
    its queue pairs with it, so each queue pair books the most that it can cause. Raises ConfigurationError if the
    device has no queue of `capacity` entries.
    """

    def __init__(self, nic: OpenNic, capacity: int) -> None:
        if not 1 <= capacity <= nic.max_cqe:
            raise ConfigurationError(
                f"a completion queue of {capacity} entries is not possible on {nic.nic.device}: 1 to {nic.max_cqe} are"
            )
        lib = nic.library
        self.nic = nic
        self.capacity = capacity
        self._lock = threading.RLock()
        self._reserved = 0
        self._releasing = 0
        self._listeners: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
        self._with_immediate = int(lib.enums.IBV_WC_RECV_RDMA_WITH_IMM)
        self._closed = False
        try:
            self._channel, self.fd = create_with_descriptor(lambda: lib.cq.CompChannel(nic.context))
            self.queue = lib.cq.CQ(nic.context, capacity, None, self._channel, 0)
        except lib.error as error:
            raise ConfigurationError(
                f"{nic.nic.device} gives no completion queue of {capacity} entries: {error}"
            ) from error
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        nic.adopt(self, order=1)
        self.arm()

    # ---- room

    def reserve(self, count: int) -> None:
        """Book room for `count` completions that may be in the queue at the same time.

        Raises Overloaded if that much is not free now, ConfigurationError if it never can be.
        """
        with self._lock:
            if count > self.capacity:
                raise ConfigurationError(f"{count} completions can never fit a queue of {self.capacity}")
            if self._reserved + count > self.capacity:
                raise Overloaded(
                    f"the completion queue of {self.capacity} has {self.capacity - self._reserved} entries free, "
                    f"{count} are needed" + (f" ({self._releasing} more after a drain)" if self._releasing else "")
                )
            self._reserved += count

    def release(self, count: int) -> None:
        """Give room back. It is free at the next drain: until then the queue may hold what was booked."""
        with self._lock:
            self._releasing += count

    # ---- completions

    def arm(self) -> None:
        """Make `fd` readable at the next completion. `drain` does so itself. Raises WorkerLost on a dead device."""
        with self._open():
            try:
                self.queue.req_notify()
            except self.nic.library.error as error:
                raise WorkerLost(f"{self.nic.nic.device} gives no notifications: {error}") from error

    def drain(self) -> list[Completion]:
        """Take all completions there are, oldest first, and arm for the next. Raises WorkerLost on a dead device.

        Armed first and polled then: what comes in between is both taken and notified, never neither.
        """
        with self._open():
            self._take_events()
            self.arm()
            releasing = self._releasing
            found: list[Completion] = []
            while True:
                try:
                    count, entries = self.queue.poll(_BATCH)
                except self.nic.library.error as error:
                    raise WorkerLost(f"the completion queue of {self.nic.nic.device} failed: {error}") from error
                found += [self._completion(entry) for entry in entries]
                if count < _BATCH:
                    break
            self._reserved -= releasing
            self._releasing -= releasing
        for completion in found:
            listener = self._listeners.get(completion.qp_num)
            if listener is not None:
                listener.completed(completion)
        return found

    def listen(self, qp_num: int, listener: Listener) -> None:
        """Tell `listener` of the completions of its queue pair, for as long as it lives."""
        self._listeners[qp_num] = listener

    def unlisten(self, qp_num: int) -> None:
        self._listeners.pop(qp_num, None)

    def close(self) -> None:
        """Destroy queue and channel; queue pairs that use them are closed before. Idempotent."""
        with self._lock:
            if self._closed:
                return
            for listener in list(self._listeners.values()):
                listener.close()
            self._closed = True
            destroy(self.queue, "completion queue")
            destroy(self._channel, "completion channel")

    def abandon(self) -> None:
        self._lock = threading.RLock()
        if self._closed:
            return
        self._closed = True
        keep(self.queue)
        keep(self._channel)
        blind(self.fd)

    def _take_events(self) -> None:
        """Acknowledged at once: destroying a queue waits for its last acknowledgement."""
        taken = 0
        while ready := self._poll.poll(0):
            if not ready[0][1] & select.POLLIN:  # closed by the kernel, which has taken the device away
                raise WorkerLost(f"{self.nic.nic.device} is gone")
            try:
                self._channel.get_cq_event(self.queue)
            except self.nic.library.error as error:
                raise WorkerLost(f"{self.nic.nic.device} gives no notifications: {error}") from error
            taken += 1
        if taken:
            self.queue.ack_events(taken)

    def _completion(self, entry: Any) -> Completion:
        status = int(entry.status)
        opcode = int(entry.opcode)
        immediate = None
        if status == OK and opcode == self._with_immediate:
            immediate = socket.ntohl(entry.imm_data)
        return Completion(entry.wr_id, status, status == OK, opcode, entry.qp_num, immediate)

    def _open(self) -> threading.RLock:
        if self._closed:
            raise WorkerLost(f"the completion queue on {self.nic.nic.device} is closed")
        return self._lock
