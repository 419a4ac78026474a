"""`hawk bench transfer`: KV from prefill pages to decode pool, HAWK against its three baselines.

Two processes, the real push and a real data plane (`--transport`); only the model is missing. The geometry is
one rank of Llama-3.1-70B at TP4: 80 layers, 2 KV heads, head dim 128, bf16. A transfer lasts from the writer's
opening of the lease until the receiver has acknowledged that the KV is in its pool. All paths take turns.

gg-direct  GPU layout, written straight into the pool      gn-hawk  NPU layout, transformed as it is written
gg-host    staged on both sides, then copied into place    gn-host  staged on both sides, then re-laid-out

The host paths work piece by piece: the writer stages one while the receiver takes another out of its slot.

Then the data plane alone: writes of a fixed size, as fast as they go, and the CPU time that the writing process spends
on each. With `--transport verbs`, perftest's ib_write_bw does the same on the same NIC: as many writes on one queue
pair, posted in chains of the same length with one completion each, as many under way. A turn of each makes a pair; the
ratio is the median of the pairs' ratios, with the interval that holds it at 95%. Hawk's turn lasts from the opening of
the lease until the receiver has acknowledged it, ib_write_bw's from its first post to its last completion; connections
exist before. Hawk sleeps until its NIC wakes it, ib_write_bw polls. Both ends are on this host, as with the other
transports: a NIC that loops back is not a wire.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import mmap
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decode_worker.pool import STAGING_SLOT_BYTES, STAGING_SLOTS
from deploy.bench import transfer_writes
from deploy.bench.transfer_pools import PATHS, TRANSPORTS, WRITER, Process, Setup
from prefill_worker.push.pieces import Pages, PieceWriter
from transport.backends import connect
from transport.backends.base import PoolWriter, WriterOptions
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.plan import plan
from transport.kernels import cpu, reference
from transport.kernels.source import Source, aligned_bytes
from transport.messages import Lease, PoolDescription

MIB = 1 << 20
SIZES = (10, 20, 40, 80, 160, 320, 640, 1280)
CHUNK_BYTES = 4 * MIB
"""As `prefill_worker.settings.push_chunk_bytes`."""
TIMEOUT_S = 60.0
SPARE_BLOCKS = 3
#: latency relative to GG-Host in the HAWK paper, at 10 MB and at 1280 MB (A100 and p150a, 200 Gb/s InfiniBand)
PAPER = {"gg-host": (1.0, 1.0), "gn-host": (8.91, 3.79), "gg-direct": (0.6630, 0.1477), "gn-hawk": (0.7725, 0.1469)}


@dataclass(frozen=True)
class Row:
    """Median over the rounds of one path and size; bytes are those of the source KV."""

    path: str
    bytes: int
    seconds: float
    landed_bytes: int

    def json(self, host: Row, direct: Row, memcpy_s: float) -> dict[str, Any]:
        return {
            "path": self.path,
            "bytes": self.bytes,
            "landed_bytes": self.landed_bytes,
            "seconds": self.seconds,
            "gb_per_s": self.bytes / self.seconds / 1e9,
            "latency_vs_gg_host": self.seconds / host.seconds,
            "speed_vs_gg_direct": direct.seconds / self.seconds,
            "speed_vs_memcpy": memcpy_s / self.seconds,
        }


class Bench:
    """The writing side: pages to push, and a connection to each of the receiver's pools."""

    def __init__(self, setup: Setup, layout: PageLayout, receiver: Process) -> None:
        self._receiver, self._setup = receiver, setup
        self._pools = {path: setup.description(path, receiver.endpoints[path]) for path in PATHS}
        options = WriterOptions(devices=setup.nics)
        self._writers: dict[str, PoolWriter] = {
            path: connect(pool, WRITER, setup.token, options=options) for path, pool in self._pools.items()
        }
        self._rng = np.random.default_rng(0)
        self._blocks = setup.geometry.num_blocks
        count = -(-setup.max_tokens // layout.block_size)
        block = self._rng.standard_normal(layout.block_elements, np.float32).view(np.uint32) >> np.uint32(16)
        shape = (setup.geometry.num_layers, count, layout.block_elements)
        pages = aligned_bytes(2 * math.prod(shape)).view(np.uint16).reshape(shape)  # as engines allocate them
        pages[:] = block.astype(np.uint16)
        pages[:, :, 0] = np.arange(count)  # no two blocks are the same
        self._source = Source(list(pages), layout)
        self._pages = Pages(self._source, cpu)
        self._table = self._rng.permutation(count)
        for path in PATHS:
            cpu.prepare(self._pools[path].geometry, layout)
        self._sequence = 0
        if setup.transport == "shm":
            for path in PATHS:  # map every page before the clock matters
                self._touch(path)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def transfer(self, path: str, tokens: int) -> Row:
        """One request's KV by one path."""
        pool, lease = self._lease(path, tokens)
        start = time.perf_counter()
        landed = self._push(path, pool, lease)
        return Row(path, self.bytes(tokens), time.perf_counter() - start, landed)

    def bytes(self, tokens: int) -> int:
        """Bytes of that many tokens' KV in the source."""
        layout = self._source.layout
        return len(self._source.layers) * 2 * layout.num_kv_heads * layout.head_dim * 2 * tokens

    def writes(self) -> transfer_writes.Target:
        """Where writes without KV may go."""
        path = "gg-direct"
        [memory] = self._setup.views(path, self._receiver.memory)
        return transfer_writes.Target(self._writers[path], lambda: self._lease(path, self._setup.max_tokens)[1], memory)

    def memcpy(self, tokens: int) -> float:
        """Seconds that the same bytes take as one contiguous copy into the same memory: a read and a write each."""
        [target] = self._setup.views("gg-direct", self._receiver.memory)
        layers = self._source.layers
        share = self.bytes(tokens) // len(layers)
        start = time.perf_counter()
        for layer, pages in enumerate(layers):
            target[layer * share : (layer + 1) * share] = pages.reshape(-1).view(np.uint8)[:share]
        return time.perf_counter() - start

    def check(self, path: str, tokens: int) -> None:
        """Push into cleared blocks and compare them with the reference. Raises RuntimeError where they differ."""
        pool, lease = self._lease(path, tokens)
        memory = self._setup.views(path, self._receiver.memory)
        runs = plan(pool.geometry, pool.bases, lease.block_ids, 0, tokens)
        for run in runs:
            memory[run.region][run.remote_offset : run.remote_offset + run.length] = 0
        self._push(path, pool, lease)
        arguments = (pool.geometry, lease.block_ids, self._source, self._table, 0, tokens)
        expected = reference.transform(*arguments)
        for run in runs:
            landed = memory[run.region][run.remote_offset : run.remote_offset + run.length]
            if not np.array_equal(landed, expected[run.local_offset : run.local_offset + run.length]):
                raise RuntimeError(f"{path}: what landed in channel {run.region} is not what was pushed")

    def _push(self, path: str, pool: PoolDescription, lease: Lease) -> int:
        writer = self._writers[path].open(lease)
        pieces = PieceWriter(writer, pool, lease, self._pages)
        landed = 0
        for piece in pieces.split(0, lease.prompt_tokens, CHUNK_BYTES):
            pieces.wait_for_room(TIMEOUT_S)
            landed += pieces.write(self._table, piece)
        writer.complete(TIMEOUT_S)
        return landed

    def _touch(self, path: str) -> None:
        writer = self._writers[path].open(self._lease(path, self._setup.max_tokens)[1])
        for memory in writer.mapped or ():
            memory[:: mmap.PAGESIZE] = 0
        writer.abort("only its mapping was wanted")

    def _lease(self, path: str, tokens: int) -> tuple[PoolDescription, Lease]:
        """A lease on blocks in random order."""
        pool = self._pools[path]
        blocks = self._rng.permutation(self._blocks)[: -(-tokens // pool.geometry.block_size)].tolist()
        self._sequence += 1
        lease_id = f"bench-{self._sequence}"
        lease = Lease(
            id=lease_id,
            worker=path,
            generation=pool.generation,
            block_ids=tuple(blocks),
            prompt_tokens=tokens,
            resident_tokens=0,
            ttl_s=TIMEOUT_S,
            slot=self._receiver.grant(path, lease_id, blocks),
        )
        if pool.staging is not None:
            slots = self._setup.staging()
            room = {
                "staging_offset": slots.offset,
                "staging_slots": slots.count,
                "staging_slot_bytes": slots.slot_bytes,
            }
            lease = lease.model_copy(update=room)
        return pool, lease


def measure(
    bench: Bench, tokens: Sequence[int], rounds: int, budget_s: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Medians over turns in which every path moves the same bytes once. → one JSON object per path and size.

    A size gets `rounds` turns (three times as many below 160 MiB), fewer where its share of the time is up.
    """
    if not tokens:
        return []
    for path in PATHS:
        bench.check(path, min(tokens))
    say("checked: every path leaves in its pool the bytes of the numpy reference")
    results = []
    deadline = time.monotonic() + budget_s
    for left, count in zip(range(len(tokens), 0, -1), tokens, strict=True):
        turns: list[dict[str, Row]] = []
        copies: list[float] = []
        started = time.monotonic()
        share = (deadline - started) / left
        for _ in range(rounds if bench.bytes(count) >= 160 * MIB else 3 * rounds):
            copies.append(bench.memcpy(count))
            turns.append({path: bench.transfer(path, count) for path in PATHS})
            if (time.monotonic() - started) * (1 + 1 / len(turns)) > share:
                break
        rows = {}
        for path in PATHS:
            seconds = statistics.median(turn[path].seconds for turn in turns)
            rows[path] = Row(path, turns[0][path].bytes, seconds, turns[0][path].landed_bytes)
        memcpy_s = statistics.median(copies)
        for row in rows.values():
            results.append(row.json(rows["gg-host"], rows["gg-direct"], memcpy_s) | {"turns": len(turns)})
        say(_line(count, rows, memcpy_s))
    return results


def _header() -> str:
    paths = "".join(f"{path:>11}" for path in PATHS)
    return (
        f"{'':16}latency, gg-host = 1{'':24} | GB/s of source KV\n"
        f"{'MiB':>6} {'tokens':>7}{paths} |{paths}{'memcpy':>9} | gn-hawk/gg-direct"
    )


def _line(tokens: int, rows: dict[str, Row], memcpy_s: float) -> str:
    size = rows["gg-host"].bytes
    latency = "".join(f"{row.seconds / rows['gg-host'].seconds:11.3f}" for row in rows.values())
    speed = "".join(f"{row.bytes / row.seconds / 1e9:11.2f}" for row in rows.values())
    ratio = rows["gg-direct"].seconds / rows["gn-hawk"].seconds
    return f"{size / MIB:6.0f} {tokens:7d}{latency} |{speed}{size / memcpy_s / 1e9:9.2f} | {ratio:.2f}x"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hawk bench transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=float, nargs="*", default=list(SIZES), metavar="MB", help="MiB of source KV; none: writes alone"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns per size at most; thrice as many below 160 MB")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all turns together, set-up not counted")
    parser.add_argument("--block-size", type=int, default=64, choices=(32, 64, 128), help="tokens, on both sides")
    parser.add_argument("--channels", type=int, default=8, help="DRAM channels of the NPU")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("float32", "bfloat16", "bfp8_b", "bfp4_b"))
    parser.add_argument("--pages", default="plain", choices=("plain", "nhd", "vec", "amx"), help="layout of P's pages")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--slots", type=int, default=STAGING_SLOTS, help="host paths: staging slots (1: no overlap)")
    parser.add_argument("--slot-bytes", type=int, default=STAGING_SLOT_BYTES, help="host paths: bytes of a slot")
    parser.add_argument("--transport", default="shm", choices=TRANSPORTS, help="data plane")
    parser.add_argument("--nic", default="", help="verbs: device[:port[:gid index]], the one found unless given")
    parser.add_argument(
        "--write-sizes", type=int, nargs="*", default=[64, 256, 1024], metavar="KIB", help="of the writes"
    )
    parser.add_argument("--write-total", type=float, default=256.0, metavar="MB", help="MiB of writes in a turn")
    parser.add_argument("--write-turns", type=int, default=15, help="per size of writes (below 6: no 95%% interval)")
    parser.add_argument("--quick", action="store_true", help="10 and 20 MB, one round: does it run")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.rounds, args.write_total, args.write_turns = [10.0, 20.0], 1, 16.0, 2
    for name in ("rounds", "channels", "layers", "slots", "slot_bytes", "write_turns"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("sizes", "write_sizes"):
        if min(getattr(args, name), default=1) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {min(getattr(args, name)):g}")
    if args.write_total * 1024 < max(args.write_sizes, default=0):
        parser.error(f"--write-total of {args.write_total:g} MiB has no room for one write of --write-sizes")
    return args


@contextlib.contextmanager
def running(setup: Setup, layout: PageLayout) -> Iterator[Bench]:
    receiver = Process(setup)
    try:
        bench = Bench(setup, layout, receiver)
        try:
            yield bench
        finally:
            bench.close()
    finally:
        receiver.close()


def _beside(transport: str, nics: Sequence[str]) -> transfer_writes.Beside | None:
    """What the same writes are compared with. Raises ConfigurationError."""
    if transport != "verbs":
        return None
    from deploy.bench import perftest
    from transport.backends.verbs.devices import choose
    from transport.backends.verbs.lanes import DEPTH
    from transport.backends.verbs.lease import CHAIN
    from transport.backends.verbs.queue_pair import Options

    [nic] = choose(nics)

    def ib_write_bw(size: int, count: int) -> float:
        count = max(count, perftest.LEAST)
        chain = math.gcd(count, min(CHAIN, transfer_writes.batch(size)))  # all its chains are of one length
        most = min(DEPTH, WriterOptions().staging_bytes // size)  # under way: what the lane and the staging hold
        posting = perftest.Posting(max(chain, most - most % chain), chain, Options().timeout)
        return perftest.ib_write_bw(nic, size, count, posting)

    return ib_write_bw


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)

    def say(line: str) -> None:
        if not args.json:
            print(line, flush=True)

    order = "LBNHC" if args.pages == "nhd" else "LBHNC"
    packing = "plain" if args.pages == "nhd" else args.pages
    layout = PageLayout(2, 128, args.block_size, order, packing, "bfloat16")
    token_bytes = args.layers * 2 * layout.num_kv_heads * layout.head_dim * 2
    tokens = sorted({max(32, round(size * MIB / token_bytes / 32) * 32) for size in args.sizes})
    most = max(tokens, default=32)
    blocks = -(-most // args.block_size) + SPARE_BLOCKS
    geometry = KVGeometry(args.layers, 2, 128, args.block_size, blocks, args.channels, args.kv_dtype)
    say(
        f"{args.layers} layers, 2 KV heads, head dim 128, {args.pages} bf16 pages of {args.block_size} tokens → "
        f"{args.kv_dtype} in {args.channels} channels, by {args.transport}; medians"
    )
    started = time.monotonic()
    nics = (args.nic,) if args.nic else ()
    sizes = [size * 1024 for size in args.write_sizes]
    try:
        with tempfile.TemporaryDirectory(prefix="hawk-bench-") as directory:
            setup = Setup(
                geometry,
                most,
                directory,
                secrets.token_hex(16),
                args.slots,
                args.slot_bytes,
                transport=args.transport,
                nics=nics,
                largest_write=max(sizes, default=0),
            )
            with running(setup, layout) as bench:
                if tokens:
                    say(_header())
                results = measure(bench, tokens, args.rounds, args.seconds, say)
                writes = transfer_writes.measure(
                    bench.writes(),
                    sizes,
                    round(args.write_total * MIB),
                    args.write_turns,
                    say,
                    _beside(args.transport, nics),
                )
    except ConfigurationError as error:
        print(f"hawk bench transfer: {error.message}", file=sys.stderr)
        return 1
    if args.json:
        outcome = {"transport": args.transport, "results": results, "writes": writes}
        print(json.dumps(outcome | {"seconds": time.monotonic() - started, "paper": PAPER}))
    else:
        paper = ", ".join(f"{path} {small:g} → {large:g}" for path, (small, large) in PAPER.items())
        if tokens:
            say(f"the paper, 10 → 1280 MB, latency with gg-host = 1: {paper}")
        say(f"{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
