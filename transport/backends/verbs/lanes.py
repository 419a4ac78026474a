"""The writer's lanes: a queue pair each, what is under way on it, and its rebuilding after a fence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transport.backends.link.handshake import Offer, PacketSocket
from transport.backends.link.packets import Ready, Renewed, Setup
from transport.backends.verbs.address import Address
from transport.backends.verbs.completions import Completions
from transport.backends.verbs.queue_pair import Options, QueuePair
from transport.backends.verbs.sender import Sender
from transport.errors import ProtocolError

if TYPE_CHECKING:
    from transport.backends.verbs.lease import VerbsLeaseWriter

DEPTH = 256
"""Writes under way on a lane: at 4 KiB each more than a 200 Gb/s wire takes in the time of an acknowledgement."""
_SPARE = 3
"""Queue pairs per lane that the completion queue has room for, as some are rebuilt while others are closed."""


@dataclass(eq=False, slots=True)
class Held:
    """Staging memory at `offset`, which the lane's NIC reads once it is `posted`, until the post `last` is complete."""

    offset: int
    posted: bool = False
    last: int | None = None


@dataclass(eq=False, slots=True)
class Lane:
    """`regions`: (address, rkey) of every region as the NIC at the lane's other end knows them.

    `held`: staging memory in the order of the posts; what never completes comes back when the lane is rebuilt, which
    the receiver has done for every lease that does not land.
    """

    index: int
    nic: int
    regions: list[tuple[int, int]]
    pair: QueuePair
    held: deque[Held] = field(default_factory=deque)
    posts: int = 0
    lease: VerbsLeaseWriter | None = None


class Lanes:
    """All lanes to one receiver. What changes them runs under the pool writer's lock."""

    def __init__(self, sender: Sender, offer: Offer, options: Options) -> None:
        self._sender, self._options = sender, options
        regions, ends = _parse(offer)
        share = -(-len(ends) // len(sender.nics))
        self.lanes: list[Lane] = []
        self._by_number: dict[tuple[int, int], Lane] = {}
        self.queues = [Completions(nic, share * _SPARE * DEPTH) for nic in sender.nics]
        try:
            for index, (their_nic, peer) in enumerate(ends):
                nic = index % len(sender.nics)
                pair = self._pair(nic, peer)
                self.lanes.append(Lane(index, nic, regions[their_nic], pair))
                self._by_number[nic, pair.qp_num] = self.lanes[-1]
        except BaseException:
            self.close()
            raise

    def addresses(self) -> list[object]:
        """Of this end, for the receiver."""
        return [lane.pair.address.to_list() for lane in self.lanes]

    def of(self, nic: int, qp_num: int) -> Lane | None:
        return self._by_number.get((nic, qp_num))

    def rebuild(self, packet: Renewed) -> Renewed:
        """Replace a lane's queue pair by one that is joined to the receiver's new one → the answer.

        What was under way on the old one is not any more. Raises ProtocolError, PushFailed, Overloaded.
        """
        if not 0 <= packet.lane < len(self.lanes):
            raise ProtocolError(f"there is no lane {packet.lane}")
        lane = self.lanes[packet.lane]
        peer = Address.from_list(packet.address)
        self._by_number.pop((lane.nic, lane.pair.qp_num), None)
        lane.pair.close()
        self.forget(lane)
        lane.pair = self._pair(lane.nic, peer)
        self._by_number[lane.nic, lane.pair.qp_num] = lane
        return Renewed(packet.lane, packet.turn, list(lane.pair.address.to_list()))

    def forget(self, lane: Lane) -> None:
        """The lane's queue pair is closed: its NIC reads no staging memory for it any more."""
        for held in lane.held:
            self._sender.staging.give(held.offset)
        lane.held.clear()

    def completed(self, lane: Lane, wr_id: int) -> None:
        """A post, and all before it on the lane, is complete."""
        while lane.held and (last := lane.held[0].last) is not None and last <= wr_id:
            self._sender.staging.give(lane.held.popleft().offset)

    def close(self) -> None:
        """Close every queue pair, then the queues. Idempotent."""
        for lane in self.lanes:
            lane.pair.close()
            self.forget(lane)
        for queue in self.queues:
            queue.close()

    def _pair(self, nic: int, peer: Address) -> QueuePair:
        pair = QueuePair(
            self._sender.nics[nic], self.queues[nic], send_depth=DEPTH, receive_depth=0, options=self._options
        )
        try:
            pair.connect(peer)
        except BaseException:
            pair.close()
            raise
        return pair


def join(link: PacketSocket, lanes: Lanes) -> None:
    """Tell the receiver where this end's lanes are, and wait until it has connected its own."""
    link.send(Setup(lanes.addresses()))
    link.expect(Ready)


def _parse(offer: Offer) -> tuple[list[list[tuple[int, int]]], list[tuple[int, Address]]]:
    match offer.details:
        case [list(nics), list(ends)]:
            pass
        case _:
            raise ProtocolError(f"{offer.details!r} is no offer of lanes")
    regions = [[_key(key) for key in keys] for keys in nics if isinstance(keys, list)]
    if len(regions) != len(nics) or any(len(keys) != len(offer.lengths) for keys in regions):
        raise ProtocolError("the offer does not name every region on every NIC")
    parsed: list[tuple[int, Address]] = []
    for end in ends:
        match end:
            case [int(nic), address] if 0 <= nic < len(regions):
                parsed.append((nic, Address.from_list(address)))
            case _:
                raise ProtocolError(f"{end!r} is no lane")
    if len(parsed) != offer.slots or not parsed:
        raise ProtocolError(f"{len(parsed)} lanes are offered for {offer.slots} slots")
    return regions, parsed


def _key(key: object) -> tuple[int, int]:
    match key:
        case [int(address), int(rkey)] if 0 <= address < 1 << 64 and 0 <= rkey < 1 << 32:
            return address, rkey
    raise ProtocolError(f"{key!r} is no address and rkey")
