"""The cluster that all end-to-end tests share: one P, two pools of different geometry, a router for each pair.

    r0 ─ p0 ─ d0   block 32, 8 channels, room for about 5000 tokens: full under the soak; stored in place
    r1 ─ p0 ─ d1   block 64, 7 channels, with checksums: staged, written, and compared before it is decoded

All in fp32, greedy text being equal only there; chunk budget 128, so that every prompt over 128 tokens is
prefilled, and pushed, in several pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transport.session.client import session_url

from .client import Client
from .cluster import HAWK, Cluster, Metrics, NotInTime, eventually
from .prompts import PromptBook

MAX_MODEL_LEN = 1024
PREFILL_BLOCK = 32
DECODE_BLOCK = {"d0": 32, "d1": 64}
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in fp32: layers · (K, V) · heads · head dim · bytes."""


class Deployment:
    """The running cluster, and what its metrics say, in words of the design."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = "smol"
        self.book = PromptBook(model)
        self.body_limit = 4 * 1024 * 1024
        self.cluster = Cluster(directory)
        self._common = {"model": model, "served_name": self.model, "grace_s": 5}
        self._engine = self._common | {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "threads": 1}
        chunks = {"block_size": PREFILL_BLOCK, "max_num_batched_tokens": 128}
        self.cluster.add("p0", "prefill", **self._engine, **chunks, hold_ttl_s=5)
        self._add_pool(0, channels=8, block_size=32, num_blocks=160)
        self._add_pool(1, channels=7, block_size=64, num_blocks=160, checksum=True)

    def _add_pool(self, number: int, *, command: tuple[str, ...] = HAWK, **pool: object) -> tuple[str, str]:
        """A decode worker and a router of its own in front of it and p0 → their names."""
        decode, router = f"d{number}", f"r{number}"
        settings = self._engine | {"kv_dtype": "float32", "lease_ttl_s": 4, "socket_dir": self.cluster.directory}
        url = self.cluster.add(decode, "decode", command=command, **(settings | pool)).url
        ends = {"prefill": self.cluster.url("p0"), "decode": url}
        self.cluster.add(router, "router", **self._common, **ends, max_body_bytes=self.body_limit)
        return decode, router

    @contextmanager
    def pool(self, *, command: tuple[str, ...] = HAWK, **settings: object) -> Iterator[tuple[str, str]]:
        """One more decode worker behind p0, with a router → (decode, router); gone at the end."""
        names = self._add_pool(len(self.cluster.roles), command=command, **settings)
        try:
            self.cluster.start(*names)
            self.cluster.wait_ready(*names)
            yield names
        finally:
            for name in reversed(names):
                self.cluster.remove(name)

    # ---- talk to it

    def url(self, name: str) -> str:
        return self.cluster.url(name)

    def session_url(self, name: str) -> str:
        return session_url(self.cluster.url(name))

    def client(self, router: str) -> Client:
        return Client(self.cluster.url(router), self.model)

    # ---- look at it

    def leases(self, decode: str) -> int:
        """Leases that D has not freed yet."""
        return int(self.cluster.metrics(decode).value("hawk_decode_leases"))

    def decoding(self, decode: str) -> int:
        return int(self.cluster.metrics(decode).value("hawk_decode_requests", state="running"))

    def landed_bytes(self, decode: str) -> int:
        """Bytes that writers have put into the pool since D started."""
        return int(self.cluster.metrics(decode).value("hawk_decode_data_plane_total", event="bytes"))

    def pool_full(self, decode: str) -> bool:
        """Every block can be had and no lease is left."""
        metrics = self.cluster.metrics(decode)
        blocks = {
            state: metrics.value("hawk_decode_blocks", state=state) for state in ("free", "cached", "held", "total")
        }
        back = blocks["held"] == 0 and blocks["free"] + blocks["cached"] == blocks["total"]
        return back and metrics.value("hawk_decode_leases") == 0

    def prefills(self, prefill: str) -> int:
        """Requests that P has taken since it started."""
        return int(self.cluster.metrics(prefill).value("hawk_prefill_requests_total"))

    def held_by_prefill(self, prefill: str) -> int:
        """Requests of which P holds anything: being prefilled, being pushed, or finished with blocks pinned."""
        metrics = self.cluster.metrics(prefill)
        names = ("unprefilled_requests", "pushing_requests", "held_requests")
        return int(sum(metrics.value(f"hawk_prefill_{name}") for name in names))

    def in_prefill(self, prefill: str, decode: str) -> bool:
        """P computes, with a lease on D."""
        computing = self.cluster.metrics(prefill).value("hawk_prefill_unprefilled_requests")
        return computing > 0 and self.leases(decode) > 0

    def fences(self, decode: str) -> int:
        """Leases whose writer D has cut off so far."""
        return int(self.cluster.metrics(decode).value("hawk_decode_fences_total"))

    def reservations(self, router: str) -> int:
        return int(self.cluster.metrics(router).value("hawk_router_reservations_total"))

    def requests(self, router: str) -> int:
        """Requests inside the router, in whatever state."""
        metrics = self.cluster.metrics(router)
        return int(
            metrics.value("hawk_router_requests_in_flight")
            + metrics.value("hawk_router_queued", **{"for": "admission"})
        )

    def residue(self) -> dict[str, Any]:
        """Everything of any request that any process still holds; empty when idle."""
        found: dict[str, Any] = {}
        for name, role in self.cluster.roles.items():
            if not role.running:
                continue
            if role.role == "prefill" and (held := self.held_by_prefill(name)):
                found[name] = held
            elif role.role == "decode" and not self.pool_full(name):
                metrics = self.cluster.metrics(name)
                found[name] = {key: metrics[key] for key in ("hawk_decode_leases", "hawk_decode_blocks")}
            elif role.role == "router" and (inside := self.requests(name)):
                found[name] = inside
        return found

    def assert_idle(self, timeout_s: float = 20) -> None:
        """Without new traffic, everything is given back."""

        def idle() -> bool:
            residue = self.residue()
            assert not residue, residue
            return True

        eventually(idle, "all leases and blocks are back", timeout_s)

    async def until_idle(self, timeout_s: float = 20) -> None:
        await asyncio.to_thread(self.assert_idle, timeout_s)

    async def until(
        self,
        check: Callable[[], bool],
        what: str,
        timeout_s: float = 60,
        *,
        during: asyncio.Task[Any] | None = None,
    ) -> None:
        """Poll another process's state without holding up the test's own streams; `during` must not end before."""
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(check):
            if during is not None and during.done():
                raise NotInTime(f"{what}: the request ended first: {during.result()}")
            if time.monotonic() > deadline:
                raise NotInTime(f"{what}: not within {timeout_s} s; {self.residue()}")
            await asyncio.sleep(0.01)

    def assert_ready(self) -> None:
        for name, role in self.cluster.roles.items():
            assert role.running, f"{name} died\n{role.tail()}"
            assert self.cluster.ready_status(name) == 200, f"{name} is not ready\n{role.tail()}"

    def metrics(self, name: str) -> Metrics:
        return self.cluster.metrics(name)
