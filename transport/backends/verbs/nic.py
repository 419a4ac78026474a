"""An open NIC: its protection domain, memory registration, and the events it raises."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import select
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from transport.backends.verbs import library
from transport.backends.verbs.descriptors import create_with_descriptor
from transport.backends.verbs.devices import Nic, open_device
from transport.backends.verbs.memlock import memlock
from transport.backends.verbs.sysfs import device_node, is_software
from transport.backends.verbs.write_chain import WriteChain
from transport.errors import ConfigurationError, WorkerLost

log = logging.getLogger(__name__)

_FATAL = {"device_fatal", "cq_err", "qp_fatal", "qp_req_err", "qp_access_err", "srq_err", "wq_fatal"}

_SCRATCH = 64

RECEIVED = (1 << 64) - 1
"""`wr_id` of every receive, so that also a failed one, whose opcode means nothing, can be told from a write."""


@dataclass(frozen=True, slots=True)
class NicEvent:
    """Something that happened to a NIC outside any work request.

    `kind`: the name of the `ibv_event_type`, lower case: "port_err" (link down), "port_active", "device_fatal",
    "cq_err" (overrun), "qp_fatal", "gid_change" and so on. `fatal`: what it happened to is of no more use. `port`
    and `qp_num` are None where pyverbs does not tell (no release up to 64 does): look at `OpenNic.port_active` and
    `QueuePair.state`.
    """

    kind: str
    fatal: bool
    port: int | None = None
    qp_num: int | None = None


class Closable(Protocol):
    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a forked child: leave it to the parent. Nothing of it may be used any more."""


def destroy(resource: Any, name: str) -> None:
    """Close a pyverbs object. A device that is gone takes its objects along and may refuse; then that is logged."""
    try:
        resource.close()
    except library.load().error as error:
        log.warning("closing %s: %s", name, error)


def keep(resource: Any) -> None:
    """In a forked child: never finalise a pyverbs object, which would destroy the parent's resource of that handle."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))


def blind(fd: int) -> None:
    """In a forked child: let go of what the descriptor shares with the parent, and keep its number taken."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, fd, inheritable=False)
    os.close(null)


class Registration:
    """A registered memory region. `address` is what a peer's write names: virtual, or the offset in a dma-buf."""

    __slots__ = ("__weakref__", "_region", "address", "length", "lkey", "rkey")

    def __init__(self, region: Any, address: int, length: int) -> None:
        self._region = region
        self.address = address
        self.length = length
        self.lkey: int = region.lkey
        self.rkey: int = region.rkey

    def close(self) -> None:
        """Deregister; from then on the NIC refuses its keys. Idempotent."""
        region, self._region = self._region, None
        if region is not None:
            destroy(region, f"memory region {self.lkey:#x}")

    def abandon(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            keep(region)


class OpenNic:
    """The context and protection domain of one NIC; one per process and NIC is enough. Thread-safe.

    It stays its process's own: in a forked child it is closed, and so is all that was opened on it.

    Raises ConfigurationError if the device cannot be opened.
    """

    def __init__(self, nic: Nic) -> None:
        self.nic = nic
        self.library = lib = library.load()
        self.software = is_software(nic.device)
        """Soft-RoCE: no device behind it."""
        self.context, self.event_fd = create_with_descriptor(
            lambda: open_device(lib, nic.device, device_node(nic.device))
        )
        try:
            self.domain: Any = lib.pd.PD(self.context)
            limits = self.context.query_device()
            port = self.context.query_port(nic.port)
            self._scratch = lib.mr.MR(self.domain, _SCRATCH, lib.enums.IBV_ACCESS_LOCAL_WRITE)
        except lib.error as error:
            self.context.close()
            raise ConfigurationError(f"{nic.device} cannot be used: {error}") from error
        self.max_queue_pairs: int = limits.max_qp
        self.max_cqe: int = limits.max_cqe
        self.max_send_wr: int = limits.max_qp_wr
        self.max_message: int = port.max_msg_sz
        """Bytes of one write."""
        self.chain = WriteChain(lib)
        # An immediate needs no memory, but pyverbs posts no receive without a piece of it.
        piece = lib.wr.SGE(self._scratch.buf, _SCRATCH, self._scratch.lkey)
        self.receive: Any = lib.wr.RecvWR(RECEIVED, 1, [piece])
        self._lock = threading.RLock()
        self._closed = False
        self._dependents: dict[int, weakref.WeakSet[Closable]] = {}
        self._poll = select.poll()
        self._poll.register(self.event_fd, select.POLLIN)
        prefix = "IBV_EVENT_"
        self._kinds = {
            int(getattr(lib.enums, name)): name[len(prefix) :].lower()
            for name in dir(lib.enums)
            if name.startswith(prefix)
        }
        _nics.add(self)

    # ---- memory

    def register(self, address: int, length: int, *, remote_write: bool) -> Registration:
        """Pin `length` bytes at `address` and let the NIC read them, and peers write them if `remote_write`.

        Takes as long as pinning takes (about 0.1 s per GiB), and stops all threads meanwhile. The memory must
        stay mapped until the registration is closed. Raises ConfigurationError that says what to do.
        """
        with self._open():
            try:
                region = self.library.mr.MR(self.domain, length, self._access(remote_write), address=address)
            except self.library.error as error:
                raise ConfigurationError(
                    self._explain(error, f"{length} bytes at {address:#x}", dmabuf=False)
                ) from error
            return self._registered(region, address, length)

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> Registration:
        """Register `length` bytes at `offset` of a dma-buf, without any mapping of it in this process.

        The region's addresses begin at `offset`, so `Registration.address == offset`. Raises ConfigurationError:
        not supported by the device or kernel, not a dma-buf, out of its bounds.
        """
        with self._open():
            try:
                region = self.library.mr.DmaBufMR(
                    self.domain, length, self._access(remote_write), dmabuf=fd, offset=offset
                )
            except self.library.error as error:
                what = f"{length} bytes at offset {offset} of dma-buf {fd}"
                raise ConfigurationError(self._explain(error, what, dmabuf=True)) from error
            return self._registered(region, offset, length)

    def _access(self, remote_write: bool) -> int:
        enums = self.library.enums
        return int(enums.IBV_ACCESS_LOCAL_WRITE | (enums.IBV_ACCESS_REMOTE_WRITE if remote_write else 0))

    def _registered(self, region: Any, address: int, length: int) -> Registration:
        registration = Registration(region, address, length)
        self.adopt(registration, order=2)
        return registration

    def _explain(self, error: Exception, what: str, *, dmabuf: bool) -> str:
        code = getattr(error, "error_code", None)
        subject = f"{self.nic.device} cannot register {what}"
        if dmabuf and code in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.ENOSYS):
            return (
                f"{subject}: device {self.nic.device} or kernel {platform.release()} does not support dma-bufs; use a "
                "NIC whose driver does (mlx5, efa, irdma, bnxt_re), peer memory, or kv_path=host"
            )
        if code in (errno.ENOMEM, errno.EPERM):
            return (
                f"{subject}: the limit of locked memory is {memlock()}; raise it with `ulimit -l unlimited`, systemd's "
                "LimitMEMLOCK=infinity, or docker --ulimit memlock=-1 --cap-add IPC_LOCK"
            )
        if code == errno.EFAULT:
            return (
                f"{subject}: it is not mapped, or has no pages that a NIC can reach (a device's BAR): map it, or use a "
                "dma-buf, peer memory or kv_path=host"
            )
        if code == errno.EBADF:
            return f"{subject}: the descriptor is no dma-buf"
        return f"{subject}: {error}"

    # ---- state and events

    @property
    def port_active(self) -> bool:
        """Whether the port carries data now; False also once the device is gone."""
        try:
            with self._open():
                state = self.context.query_port(self.nic.port).state
        except (WorkerLost, self.library.error):
            return False
        return bool(state == self.library.enums.IBV_PORT_ACTIVE)

    def take_event(self) -> NicEvent | None:
        """The next event, or None; `event_fd` is readable when there is one. Never blocks.

        After "device_fatal" the descriptor stays readable: stop listening to it.
        """
        with self._open():
            if not (ready := self._poll.poll(0)):
                return None
            if not ready[0][1] & select.POLLIN:  # closed by the kernel, which has taken the device away
                return NicEvent("device_fatal", fatal=True)
            try:
                event = self.context.get_async_event()
            except self.library.error as error:
                raise WorkerLost(f"{self.nic.device} gives no events: {error}") from error
            event.ack()
            kind = self._kinds.get(int(event.event_type), f"event {event.event_type}")
            return NicEvent(kind, fatal=kind in _FATAL)

    # ---- the end

    def adopt(self, dependent: Closable, *, order: int) -> None:
        """Close `dependent` with the NIC: 0 queue pairs, 1 completion queues, 2 memory regions."""
        self._dependents.setdefault(order, weakref.WeakSet()).add(dependent)

    def close(self) -> None:
        """Close everything that was opened on this NIC, then the NIC. Idempotent."""
        with self._lock:
            if self._closed:
                return
            for _, dependents in sorted(self._dependents.items()):
                for dependent in list(dependents):
                    dependent.close()
            self._closed = True
            destroy(self._scratch, "scratch region")
            destroy(self.domain, "protection domain")
            destroy(self.context, self.nic.device)

    def abandon(self) -> None:
        """In a forked child: leave the NIC to the parent, whose queue pairs and memory it holds.

        The child has the same handles on the same device file, and would destroy the parent's resources by them.
        """
        self._lock = threading.RLock()  # a thread of the parent may have held the old one
        if self._closed:
            return
        self._closed = True
        for dependents in self._dependents.values():
            for dependent in list(dependents):
                dependent.abandon()
        for resource in (self._scratch, self.domain, self.context):
            keep(resource)
        for fd in (self.context.cmd_fd, self.event_fd):
            blind(fd)

    def _open(self) -> threading.RLock:
        """The lock, of a NIC that is open: pyverbs would follow a null pointer on a closed one."""
        if self._closed:
            raise WorkerLost(f"NIC {self.nic.device} is closed")
        return self._lock


_nics: weakref.WeakSet[OpenNic] = weakref.WeakSet()


def _abandon_all() -> None:
    for nic in list(_nics):
        nic.abandon()
    _nics.clear()


os.register_at_fork(after_in_child=_abandon_all)
