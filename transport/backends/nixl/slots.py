"""What one writer of the NIXL receiver has: an agent of its own, which the receiver can destroy."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from transport.backends.link.packets import Renewed
from transport.backends.link.slots import slot_token, split_token
from transport.backends.nixl import ucx
from transport.backends.nixl.agent import Agent
from transport.errors import ProtocolError, PushFailed
from transport.kernels.source import address

PROBE_BYTES = 32


class NixlSlots:
    """`Slots` on one agent, so a single lease is fenced by its writer's word alone.

    Where the transports are strict, a writer that keeps its word to itself for `fence_wait_s` is stopped by `drop`,
    which ends its connection with all its leases.
    """

    shared = False
    immediates = False

    def __init__(
        self,
        count: int,
        agent: Agent,
        regions: Sequence[np.ndarray],
        fence_wait_s: float,
        drop: Callable[[], None],
    ) -> None:
        self.count = count
        self.strict = ucx.strict()
        self._agent = agent
        self._probe = np.zeros(PROBE_BYTES, np.uint8)
        agent.register([*regions, self._probe])
        self._addresses = [address(region) for region in regions]
        self._fence_wait_s = fence_wait_s
        self._drop = drop
        self._free = deque(range(count))
        self._awaited: dict[int, asyncio.TimerHandle] = {}

    def offer(self) -> tuple[list[object], Sequence[int]]:
        """[the agent's metadata, address of each region, address to try a write on]"""
        return [self._agent.metadata(), list(self._addresses), address(self._probe)], ()

    def setup(self, answer: list[object] | None) -> bool:
        """The writer says what it has written as a trial: what it takes for landed is in place, or it is not taken."""
        if answer is None:
            return False
        if answer != [self._probe.tobytes()]:
            raise PushFailed("the writer's trial write has not arrived, though UCX told it so")
        return True

    def take(self, epoch: int) -> int:
        return slot_token(self._free.popleft(), epoch)

    def revoke(self, token: int) -> bool:
        if self.strict and token not in self._awaited:
            self._awaited[token] = asyncio.get_running_loop().call_later(self._fence_wait_s, self._drop)
        return False

    def release(self, token: int) -> None:
        timer = self._awaited.pop(token, None)
        if timer is not None:
            timer.cancel()
        self._free.append(split_token(token)[0])

    def renewed(self, packet: Renewed) -> None:
        raise ProtocolError("the nixl backend has no lanes")

    def close(self) -> None:
        for timer in self._awaited.values():
            timer.cancel()
        self._awaited.clear()
        self._agent.close()
