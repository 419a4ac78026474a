"""What one writer of the RDMA receiver holds: lanes, each a queue pair of its own that a lease has to itself.

Revoking a lease takes its lane's queue pair out of service, which is the fence: the NIC refuses what a stale writer
still sends, whatever state its process is in. Then both ends build the lane anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transport.backends.link.packets import Renewed, Taken
from transport.backends.link.slots import slot_token, split_token
from transport.backends.verbs.address import Address
from transport.backends.verbs.completions import Completion, Completions
from transport.backends.verbs.credit import RECEIVES, TELL
from transport.backends.verbs.nic import OpenNic, Registration
from transport.backends.verbs.queue_pair import Options, QueuePair
from transport.backends.verbs.status import FLUSHED, describe
from transport.errors import HawkError, Overloaded, ProtocolError

log = logging.getLogger(__name__)

_SENDS = 1
"""This end writes nothing, but there is no queue pair without a send queue."""
SPARE = 4
"""Queue pairs per lane that the completion queue has room for: the live one, and fenced ones that await their end."""
RETRY_S = 0.01
QUARANTINE_S = 10.0
"""A fenced queue pair's number stays taken until its writer has none of its own, or, where the writer is gone, as
long as its NIC may go on trying (`Options.detection_s`)."""


@dataclass(eq=False, slots=True)
class Lane:
    """`epoch`: of the lease that has it, 0 for none. `ready`: both ends are connected. `turn` counts rebuildings.

    `taken` counts the lease's immediates.
    """

    index: int
    nic: int
    pair: QueuePair
    turn: int = 0
    epoch: int = 0
    ready: bool = False
    taken: int = 0
    fenced: list[QueuePair] = field(default_factory=list)

    @property
    def token(self) -> int:
        return slot_token(self.index, self.epoch)


class VerbsSlots:
    """`Slots` that are lanes, dealt over the NICs in turn.

    `keys[n]`: NIC n's registrations of the regions. `arrived(token)` and `broken(token, reason)` tell the receiver
    what happened on a lease's lane, `tell(packet)` sends to the writer.
    """

    shared = False
    strict = True
    immediates = True

    def __init__(
        self,
        nics: Sequence[OpenNic],
        keys: Sequence[Sequence[Registration]],
        count: int,
        options: Options,
        arrived: Callable[[int], None],
        broken: Callable[[int, str], None],
        tell: Callable[[Renewed | Taken], None],
    ) -> None:
        self.count = count
        self._nics, self._keys, self._options = nics, keys, options
        self._arrived, self._broken, self._tell = arrived, broken, tell
        self._loop = asyncio.get_running_loop()
        self._closed = False
        share = -(-count // len(nics))
        self._queues = [Completions(nic, share * SPARE * (RECEIVES + _SENDS)) for nic in nics]
        self._lanes: list[Lane] = []
        self._free: deque[Lane] = deque()
        self._by_number: dict[tuple[int, int], Lane] = {}
        try:
            for index in range(count):
                nic = index % len(nics)
                lane = Lane(index, nic, self._pair(nic))
                self._lanes.append(lane)
                self._by_number[nic, lane.pair.qp_num] = lane
        except BaseException:
            self._destroy()
            raise
        for nic, queue in enumerate(self._queues):
            self._loop.add_reader(queue.fd, self._drain, nic)

    # ---- Slots protocol

    def offer(self) -> tuple[list[object], Sequence[int]]:
        """Per NIC the (address, rkey) of every region; per lane its NIC and its queue pair's address."""
        regions = [[[key.address, key.rkey] for key in keys] for keys in self._keys]
        return [regions, [[lane.nic, lane.pair.address.to_list()] for lane in self._lanes]], ()

    def setup(self, answer: list[object] | None) -> bool:
        if answer is None:
            return False
        if len(answer) != len(self._lanes):
            raise ProtocolError(f"addresses for {len(answer)} lanes, there are {len(self._lanes)}")
        for lane, address in zip(self._lanes, answer, strict=True):
            self._join(lane, Address.from_list(address))
        return True

    def take(self, epoch: int) -> int:
        """Of the NIC that has the fewest leases, the lane that has been free the longest."""
        if not self._free:
            raise IndexError("no lane is free")
        busy = Counter(lane.nic for lane in self._lanes if lane.epoch)
        lane = min(self._free, key=lambda lane: busy[lane.nic])
        self._free.remove(lane)
        lane.epoch, lane.taken = epoch, 0
        return lane.token

    def revoke(self, token: int) -> bool:
        lane = self._lane(token)
        if lane is not None:
            self._rebuild(lane)
        return True

    def release(self, token: int) -> None:
        lane = self._lane(token)
        if lane is not None:
            lane.epoch = 0
            if lane.ready:
                self._free.append(lane)

    def renewed(self, packet: Renewed) -> None:
        if not 0 <= packet.lane < len(self._lanes):
            raise ProtocolError(f"there is no lane {packet.lane}")
        lane = self._lanes[packet.lane]
        if packet.turn != lane.turn or lane.ready:
            return  # it was fenced again meanwhile, and the writer has been told so
        self._join(lane, Address.from_list(packet.address))
        while lane.fenced:  # the writer's ends of these are gone
            lane.fenced.pop().close()

    def close(self) -> None:
        """Nothing that the writer does lands from here on."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes:
            self._reset(lane.pair)
        for queue in self._queues:
            self._loop.remove_reader(queue.fd)
        quarantine = max(QUARANTINE_S, self._options.detection_s[1])
        self._loop.call_later(quarantine, self._destroy)

    # ---- inside

    def _lane(self, token: int) -> Lane | None:
        """The lane of a lease that has it still."""
        index, epoch = split_token(token)
        lane = self._lanes[index]
        return lane if epoch and lane.epoch == epoch else None

    def _pair(self, nic: int) -> QueuePair:
        return QueuePair(
            self._nics[nic], self._queues[nic], send_depth=_SENDS, receive_depth=RECEIVES, options=self._options
        )

    def _join(self, lane: Lane, peer: Address) -> None:
        lane.pair.connect(peer)
        lane.pair.post_receives(RECEIVES)
        lane.ready = True
        if not lane.epoch:
            self._free.append(lane)

    def _reset(self, pair: QueuePair) -> None:
        try:
            pair.reset()
        except Exception as error:
            # A queue pair of a NIC that is gone executes nothing either; one that only refuses must not live on.
            log.warning("queue pair %d could not be reset (%s), it is destroyed", pair.qp_num, error)
            pair.close()

    def _rebuild(self, lane: Lane) -> None:
        """Fence, then offer the writer a new queue pair for the lane."""
        if self._closed or not lane.ready:
            return
        lane.ready = False
        if lane in self._free:
            self._free.remove(lane)
        old = lane.pair
        self._reset(old)
        self._by_number.pop((lane.nic, old.qp_num), None)
        lane.fenced.append(old)
        while len(lane.fenced) > SPARE - 2:
            lane.fenced.pop(0).close()
        self._offer_anew(lane)

    def _offer_anew(self, lane: Lane) -> None:
        if self._closed:
            return
        try:
            lane.pair = self._pair(lane.nic)
        except Overloaded:  # room that was given back is free after a drain
            self._loop.call_soon(self._drain, lane.nic)
            self._loop.call_later(RETRY_S, self._offer_anew, lane)
            return
        except HawkError as error:
            # The lane stays out of use; the connection lives on with those that are left.
            log.error("lane %d cannot be rebuilt: %s", lane.index, error)
            return
        self._by_number[lane.nic, lane.pair.qp_num] = lane
        lane.turn += 1
        self._tell(Renewed(lane.index, lane.turn, list(lane.pair.address.to_list())))

    def _drain(self, nic: int) -> None:
        try:
            completions = self._queues[nic].drain()
        except HawkError as error:
            log.error("lanes on %s are lost: %s", self._nics[nic].nic.device, error)
            self._loop.remove_reader(self._queues[nic].fd)
            for lane in self._lanes:
                if lane.nic == nic and lane.epoch:
                    self._fail(lane, str(error))
            return
        for completion in completions:
            of = self._by_number.get((nic, completion.qp_num))
            if of is None or self._closed:
                continue
            try:
                self._completed(of, completion)
            except HawkError as error:  # of this lane only: the batch holds other lanes' completions too
                self._fail(of, f"lane {of.index}: {error}")

    def _completed(self, lane: Lane, completion: Completion) -> None:
        if not completion.ok:
            self._fail(lane, f"lane {lane.index}: {_why(completion.status)}")
            return
        # First what has arrived: the queue pair may have failed behind it, and then takes no receive.
        token = lane.token
        if lane.epoch and completion.immediate == lane.epoch & 0xFFFFFFFF:
            self._arrived(token)
        else:
            log.warning("lane %d: an immediate %s of no lease", lane.index, completion.immediate)
        lane.pair.post_receives(1)
        if lane.epoch and lane.token == token:
            lane.taken += 1
            if lane.taken % TELL == 0:
                self._tell(Taken(token, lane.taken))

    def _fail(self, lane: Lane, reason: str) -> None:
        token = lane.token if lane.epoch else 0
        self._rebuild(lane)
        if token:
            self._broken(token, reason)

    def _destroy(self) -> None:
        for lane in self._lanes:
            for pair in (lane.pair, *lane.fenced):
                pair.close()
        for queue in self._queues:
            queue.close()


def _why(status: int) -> str:
    """Of a lane that this end has not fenced. Its receives are flushed when the NIC refuses a write on it."""
    if status == FLUSHED:
        return (
            "the NIC has stopped it, as it does when it refuses a write: a wrong rkey, or outside the region "
            f"({describe(status)})"
        )
    return describe(status)
