"""P's end of the RDMA data plane: lanes to one receiver, and the thread that sees their completions."""

from __future__ import annotations

from transport.backends.base import OnLost, WriterOptions
from transport.backends.link import packets
from transport.backends.link.handshake import Offer, PacketSocket, shake_hands
from transport.backends.link.slots import split_token
from transport.backends.link.staging import StagingMemory
from transport.backends.link.tcp import connect_tcp
from transport.backends.link.writer import LinkPoolWriter
from transport.backends.verbs import sender as senders
from transport.backends.verbs.lanes import Lane, Lanes, join
from transport.backends.verbs.lease import VerbsLeaseWriter
from transport.backends.verbs.queue_pair import Options
from transport.backends.verbs.sender import Sender
from transport.backends.verbs.status import REFUSALS, describe
from transport.errors import HawkError
from transport.messages import PoolDescription, Writer


def connect(
    pool: PoolDescription,
    writer: Writer,
    token: str,
    *,
    on_lost: OnLost | None = None,
    options: WriterOptions | None = None,
    patience: Options | None = None,
    timeout_s: float = 5.0,
) -> VerbsPoolWriter:
    """Connect to a pool's receiver. `on_lost(reason)` is called once, in the listening thread, if it goes away.

    Raises AuthenticationFailed, StaleGeneration, GeometryMismatch, ProtocolError, PushFailed (cannot connect),
    ConfigurationError (no RDMA here, no such device, memory refused).
    """
    options = options or WriterOptions()
    patience = patience or Options()
    sender = senders.acquire(options)
    try:
        link = connect_tcp(pool, timeout_s)
        try:
            lengths: list[int] = []

            def take(link: PacketSocket, offer: Offer) -> Lanes:
                lengths.extend(offer.lengths)
                lanes = Lanes(sender, offer, patience)
                try:
                    join(link, lanes)
                except BaseException:
                    lanes.close()
                    raise
                return lanes

            lanes = shake_hands(link, pool, writer, token, take)
            return VerbsPoolWriter(link, pool, lengths, lanes, sender, options, on_lost)
        except BaseException:
            link.sock.close()
            raise
    except BaseException:
        senders.release(options)
        raise


class VerbsPoolWriter(LinkPoolWriter):
    """A lease is written on the lane that its slot names."""

    def __init__(
        self,
        link: PacketSocket,
        pool: PoolDescription,
        lengths: list[int],
        lanes: Lanes,
        sender: Sender,
        options: WriterOptions,
        on_lost: OnLost | None,
    ) -> None:
        fds = [queue.fd for queue in lanes.queues]
        super().__init__(link, pool, len(lanes.lanes), lengths, on_lost, watched=fds)
        self._lanes, self._sender, self._options = lanes, sender, options
        self.nics = [(nic.nic.device, nic.nic.port) for nic in sender.nics]
        self._nic_of = {fd: nic for nic, fd in enumerate(fds)}
        self.listen()

    @property
    def staging(self) -> StagingMemory:
        return self._sender.staging

    def lkey(self, lane: Lane) -> int:
        return self._sender.lkeys[lane.nic]

    def max_message(self, lane: Lane) -> int:
        """Bytes of one write."""
        return self._sender.nics[lane.nic].max_message

    # ---- LinkPoolWriter

    def _make_lease(self, lease_id: str, token: int) -> VerbsLeaseWriter:
        lane = self._lanes.lanes[split_token(token)[0]]
        lane.lease = VerbsLeaseWriter(self, lease_id, token, lane)
        return lane.lease

    def _on_watched(self, fd: int) -> None:
        nic = self._nic_of[fd]
        completions = self._lanes.queues[nic].drain()
        with self.changed:
            for completion in completions:
                lane = self._lanes.of(nic, completion.qp_num)
                if lane is None:  # of a queue pair that was replaced
                    continue
                if completion.ok:
                    self._lanes.completed(lane, completion.wr_id)
                elif lane.lease is not None:
                    self.counters[f"failed_wc_{completion.status}"] += 1
                    lane.lease.break_off(
                        f"NIC of {self.pool.worker}: {describe(completion.status)}",
                        fenced=completion.status not in REFUSALS,
                    )
            self.changed.notify_all()

    def _on_packet(self, packet: packets.Packet) -> bool:
        if isinstance(packet, packets.Taken):
            self._taken(packet)
            return True
        if not isinstance(packet, packets.Renewed):
            return False
        lane = self._lanes.lanes[packet.lane] if 0 <= packet.lane < len(self._lanes.lanes) else None
        if lane is not None and lane.lease is not None:
            lane.lease.break_off("its lane was fenced")
            lane.lease = None
        # What was granted on the lane before it was fenced must not find its way onto the new queue pair.
        for lease_id in [known for known, token in self._granted.items() if split_token(token)[0] == packet.lane]:
            del self._granted[lease_id]
        for fd in self._nic_of:  # makes room in the completion queues, too
            self._on_watched(fd)
        try:
            answer = self._lanes.rebuild(packet)
        except HawkError as error:  # a fresh connection is worth more than one that loses its lanes
            self.counters["failed_lane"] += 1
            self._end(f"lane {packet.lane} cannot be rebuilt: {error}")
            return True
        self.counters["lanes_rebuilt"] += 1
        self.try_send(answer)
        self.changed.notify_all()
        return True

    def _taken(self, packet: packets.Taken) -> None:
        slot, _ = split_token(packet.slot)
        lease = self._lanes.lanes[slot].lease if slot < len(self._lanes.lanes) else None
        if lease is not None and lease.token == packet.slot:
            lease.taken(packet.count)

    def _release(self) -> None:
        self._lanes.close()
        senders.release(self._options)
