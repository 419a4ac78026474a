"""A NIXL agent: registered memory that is written into, or written from."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from transport.backends.nixl import library, ucx
from transport.errors import ConfigurationError, PushFailed
from transport.kernels.source import address

_PROGRESS_US = 10_000
"""How often the agent's thread looks around though no descriptor woke it: 0.5 % of a CPU. With 0 it never sleeps."""
_LEAST_NAP_S = 20e-6
_LONGEST_NAP_S = 2e-3
_CLOSE_WAIT_S = 5.0

Write = tuple[int, int, int]
"""(address here, address there, bytes)"""


class Agent:
    """One end of transfers by UCX, reached by way of `host` (an address of this machine), with a progress thread.

    What it has registered may be written by whoever has its `metadata`. `write` is thread-safe, the rest is called by
    one thread. Raises ConfigurationError if there is no NIXL, or UCX cannot use what it is told to.
    """

    def __init__(self, name: str, host: str) -> None:
        self._nixl = library.load()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        settings = ucx.engine_config(host)
        self._idle = threading.Condition()
        self._writing = 0
        self._closing = False
        self._memory: list[np.ndarray] = []
        try:
            self._agent = self._nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend("UCX", {"engine_config": settings})
        except Exception as error:
            raise ConfigurationError(
                f"UCX makes no agent of {settings or 'its defaults'} (UCX_TLS={','.join(ucx.transports())}): {error}; "
                "UCX_LOG_LEVEL=info says more. Shared memory alone cannot do, it needs tcp beside it"
            ) from error
        _agents.add(self)

    def register(self, memory: Sequence[np.ndarray]) -> None:
        """Let it be written into and from. Raises ConfigurationError."""
        areas = [(address(array), array.nbytes, 0, "") for array in memory]
        try:
            self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, areas), [self._backend])
        except Exception as error:
            raise ConfigurationError(f"UCX does not register {sum(a[1] for a in areas)} bytes: {error}") from error
        self._memory.extend(memory)

    def metadata(self) -> bytes:
        """By which others reach the agent and all that it has registered."""
        packed: bytes = self._agent.getLocalMD()
        return packed

    def join(self, metadata: bytes) -> str:
        """Connect to another agent → its name. Raises PushFailed."""
        try:
            name: str = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(name, [self._backend])
        except Exception as error:
            raise PushFailed(
                f"UCX finds no way to the receiver by {','.join(ucx.transports())}: {error}; "
                "UCX_TLS must fit at both ends"
            ) from error
        return name

    def write(self, peer: str, writes: Sequence[Write], timeout_s: float, going_on: Callable[[], bool]) -> None:
        """Write into another agent's memory; returns when the bytes are in place there.

        Raises PushFailed when the peer is gone, when the time is over, or when `going_on()` turned false; the bytes
        may still be under way then, until this agent or the other one is closed.
        """
        with self._idle:
            if self._closing:
                raise PushFailed("the agent is closed")
            self._writing += 1
        try:
            self._write(peer, writes, time.monotonic() + timeout_s, going_on)
        except PushFailed:
            raise
        except Exception as error:
            raise PushFailed(f"UCX: {error}") from error
        finally:
            with self._idle:
                self._writing -= 1
                self._idle.notify_all()

    def _write(self, peer: str, writes: Sequence[Write], deadline: float, going_on: Callable[[], bool]) -> None:
        # No local name for the agent: an exception would keep it from being destroyed, for as long as it is around.
        nixl = self._nixl
        here = nixl.nixlXferDList(nixl.DRAM_SEG, [(source, length, 0) for source, _, length in writes])
        there = nixl.nixlXferDList(nixl.DRAM_SEG, [(target, length, 0) for _, target, length in writes])
        request = self._agent.createXferReq(nixl.NIXL_WRITE, here, there, peer, "", [self._backend])
        try:
            started = time.monotonic()
            status = self._agent.postXferReq(request, "")
            # NIXL flushes the endpoint behind the writes: the status turns when the receiver has confirmed them.
            while status == nixl.NIXL_IN_PROG:
                now = time.monotonic()
                if now > deadline:
                    raise PushFailed("a write was not confirmed in time")
                if self._closing or not going_on():
                    raise PushFailed("the connection is over")
                time.sleep(min(max(_LEAST_NAP_S, (now - started) / 8), _LONGEST_NAP_S))
                status = self._agent.getXferStatus(request)
        finally:
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Destroy the agent: when this returns, it neither sends anything nor stores anything that is sent to it.

        Writes of other threads are broken off. Idempotent.
        """
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: not self._writing, _CLOSE_WAIT_S)
        self._agent = None
        self._memory.clear()
        _agents.discard(self)

    def abandon(self) -> None:
        """In a forked child, which has none of the agent's threads: leave it as it is, for ever."""
        if self._agent is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))
        self._closing = True
        self._agent = None


_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _close_all() -> None:
    """Before the interpreter ends, and the libraries that the agents' threads run in."""
    for agent in list(_agents):
        agent.close()


def _abandon_all() -> None:
    for agent in list(_agents):
        agent.abandon()
    _agents.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
