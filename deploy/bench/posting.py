"""What posting RDMA writes costs the CPU, per write: `python -m deploy.bench.posting`.

Requests can be built without a device, so that part is measured anywhere: made anew for each post, or once and then
filled anew (`transport.backends.verbs.write_chain`, Hawk's way). With a device, handing them over comes on top, and
beside it the extended interface (`wr_start` to `wr_complete`), whose filling already writes the device's queue. On
Soft-RoCE the kernel sends the packets while they are handed over, which no NIC does: there, only filling counts.

The budget is the time of the same writes on the wire: 1280 writes of a 2186-token prompt of a 70B model at tensor
parallelism 4 take 28.7 ms at 200 Gb/s. `--json` prints the numbers alone; the calibration loop relates two machines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from transport.backends.verbs import devices, library
from transport.backends.verbs.completions import Completions
from transport.backends.verbs.library import Library
from transport.backends.verbs.nic import OpenNic
from transport.backends.verbs.queue_pair import Options, QueuePair
from transport.backends.verbs.status import describe
from transport.backends.verbs.write_chain import Write, WriteChain
from transport.errors import ConfigurationError

WRITES = 1280
WIRE_MS = 28.7
LENGTH = 256
"""Bytes of a write where they are really sent: the cost of posting does not depend on it."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.bench.posting", description=__doc__.partition("\n")[0])
    parser.add_argument("--writes", type=int, default=WRITES, help="in one post (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=50, help="of each measurement, of which the best counts")
    parser.add_argument("--nic", default="", help="device, device:port or device:port:gid index")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        results = building(library.load(), args.writes, args.repeat)
    except ConfigurationError as error:
        print(f"posting: {error.message}", file=sys.stderr)
        return 1
    try:
        [nic] = devices.choose([args.nic] if args.nic else [])
    except ConfigurationError as error:
        print(f"building only: {error.message}", file=sys.stderr)
    else:
        results |= posting(OpenNic(nic), args.writes, args.repeat)
    if args.json:
        print(json.dumps(results))
        return 0
    for name, microseconds in results.items():
        print(f"{name:42} {microseconds:7.3f} µs per write {microseconds * WRITES / 1000:8.2f} ms per {WRITES}")
    print(f"{'on a 200 Gb/s wire':42} {WIRE_MS * 1000 / WRITES:7.3f} µs per write {WIRE_MS:8.2f} ms per {WRITES}")
    return 0


def building(lib: Library, count: int, repeat: int) -> dict[str, float]:
    """µs per write of making the requests, posted to nowhere."""
    writes: list[Write] = [(0x7F0000000000 + i * 65536, 7, 65536, 0x7E0000000000 + i * 65536, 9) for i in range(count)]
    chain = WriteChain(lib)

    class Nowhere:
        def post_send(self, first: Any) -> None:
            pass

    nowhere = Nowhere()

    def refill() -> None:
        chain.post(nowhere, writes, wr_id=1, immediate=None, signaled=True, max_inline=64)

    def calibration() -> None:
        total = 0
        for i in range(count):
            total += i * i

    refill()
    return {
        "calibration loop": best(calibration, count, repeat),
        "build: requests made anew": best(lambda: free(make(lib, writes)), count, repeat),
        "build: requests filled anew": best(refill, count, repeat),
    }


def posting(nic: OpenNic, count: int, repeat: int) -> dict[str, float]:
    """µs per write on a device: filling a chain of `count`, and handing it over, which includes the doorbell."""
    memory = mmap.mmap(-1, count * LENGTH)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    region = nic.register(address, len(memory), remote_write=True)
    writes: list[Write] = [
        (address + i * LENGTH, region.lkey, LENGTH, address + i * LENGTH, region.rkey) for i in range(count)
    ]
    results = {}
    for kind in (Filled, Made, Extended):
        done = Completions(nic, 2 * count + 2)
        try:
            pair = kind(nic, done, send_depth=count, receive_depth=0, options=Options(max_inline=0))
            peer = QueuePair(nic, done, send_depth=1, receive_depth=0)
        except ConfigurationError as error:
            print(f"post: {kind.title}: not on this device: {error.message}", file=sys.stderr)
            continue
        pair.connect(peer.address)
        peer.connect(pair.address)
        fills, posts = [], []
        for _ in range(repeat):
            start = time.perf_counter()
            pair.fill(writes)
            filled = time.perf_counter()
            pair.hand_over()
            fills.append(filled - start)
            posts.append(time.perf_counter() - filled)
            while not (completions := done.drain()):
                select.select([done.fd], [], [])
            if not completions[0].ok:
                raise ConfigurationError(f"a write failed: {describe(completions[0].status)}")
        results[f"{kind.title}: filled"] = min(fills) * 1e6 / count
        results[f"{kind.title}: handed over"] = min(posts) * 1e6 / count
        for closable in (pair, peer, done):
            closable.close()
    nic.close()
    return results


class Filled(QueuePair):
    """Hawk's way."""

    title = "requests filled anew"

    def fill(self, writes: Sequence[Write]) -> None:
        self._first = self.nic.chain._fill(writes, 1, None, True, 0)

    def hand_over(self) -> None:
        self._qp.post_send(self._first)


class Made(QueuePair):
    title = "requests made anew"

    def fill(self, writes: Sequence[Write]) -> None:
        self._requests = make(self.nic.library, writes)

    def hand_over(self) -> None:
        self._qp.post_send(self._requests[-1])
        free(self._requests)


class Extended(QueuePair):
    """A queue pair of the extended interface, which takes one request after the other into its queue."""

    title = "extended interface"

    def _create(self) -> tuple[Any, int]:
        lib = self.nic.library
        enums, queue = lib.enums, self._completions.queue
        wanted = lib.qp.QPInitAttrEx(
            qp_type=enums.IBV_QPT_RC,
            scq=queue,
            rcq=queue,
            cap=lib.qp.QPCap(max_send_wr=self.send_depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1),
            pd=self.nic.domain,
            sq_sig_all=0,
            comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=enums.IBV_QP_EX_WITH_RDMA_WRITE,
        )
        first = lib.qp.QPAttr(port_num=self.nic.nic.port)
        first.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE
        self._piece = lib.wr.SGE(0, 0, 0)
        try:
            return lib.qp.QPEx(self.nic.context, wanted, first), 0
        except lib.error as error:
            raise ConfigurationError(str(error)) from error

    def fill(self, writes: Sequence[Write]) -> None:
        qp, piece = self._qp, self._piece
        signaled = self.nic.library.enums.IBV_SEND_SIGNALED
        last = len(writes) - 1
        qp.wr_start()
        for i, (address, lkey, length, remote_address, rkey) in enumerate(writes):
            qp.wr_id = 1
            qp.wr_flags = signaled if i == last else 0
            qp.wr_rdma_write(rkey, remote_address)
            piece.addr = address
            piece.length = length
            piece.lkey = lkey
            qp.wr_set_sge(piece)

    def hand_over(self) -> None:
        self._qp.wr_complete()


def make(lib: Library, writes: Sequence[Write]) -> list[Any]:
    """A chain of new requests, the first one last."""
    enums = lib.enums
    requests: list[Any] = []
    flags, following = enums.IBV_SEND_SIGNALED, None
    for address, lkey, length, remote_address, rkey in reversed(writes):
        piece = lib.wr.SGE(address, length, lkey)
        following = lib.wr.SendWR(1, enums.IBV_WR_RDMA_WRITE, 1, 0, [piece], flags, following)
        following.set_wr_rdma(rkey, remote_address)
        piece.close()
        requests.append(following)
        flags = 0
    return requests


def free(requests: Sequence[Any]) -> None:
    """pyverbs does not free what a request points to by itself."""
    for request in requests:
        request.close()


def best(call: Callable[[], None], count: int, repeat: int) -> float:
    """µs per write of the quickest of `repeat` calls, each for `count` writes."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6 / count


if __name__ == "__main__":
    sys.exit(main())
