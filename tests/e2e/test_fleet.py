"""Two prefill and two decode workers behind one router: both are used, and the loss of one of each loses no answer."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .client import Client, Outcome
from .cluster import Cluster, eventually
from .reference import Answer
from .topology import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

REQUESTS, AT_A_TIME, TOKENS = 32, 8, 6


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Cluster]:
    """p0, p1, d0, d1 and a router that knows all four. The pools differ in block size and channels."""
    common = {"model": model, "served_name": "smol", "grace_s": 5}
    engine = common | {"dtype": "float32", "max_model_len": 1024, "threads": 1}
    with tempfile.TemporaryDirectory(prefix="hawk-fleet-") as directory:
        cluster = Cluster(Path(directory))
        for name in ("p0", "p1"):
            chunks = {"block_size": 32, "max_num_batched_tokens": 128, "kv_cache_gib": 0.5}
            cluster.add(name, "prefill", **engine, **chunks)
        for name, block_size, channels in (("d0", 32, 8), ("d1", 64, 7)):
            pool = {"block_size": block_size, "channels": channels, "num_blocks": 160, "kv_dtype": "float32"}
            cluster.add(name, "decode", **engine, **pool, lease_ttl_s=4, socket_dir=cluster.directory)
        prefill, decode = (json.dumps([cluster.url(f"{role}{i}") for i in (0, 1)]) for role in "pd")
        cluster.add("r", "router", **common, prefill=prefill, decode=decode)
        with cluster:
            cluster.start()
            cluster.wait_ready(timeout_s=240)
            yield cluster


def taken(cluster: Cluster, name: str) -> int:
    """Requests that a worker has had since it started."""
    metric = "hawk_prefill_requests_total" if name.startswith("p") else "hawk_decode_tokens_total"
    return int(cluster.metrics(name).value(metric))


def leases(cluster: Cluster, decode: str) -> int:
    return int(cluster.metrics(decode).value("hawk_decode_leases"))


def all_open(cluster: Cluster) -> bool:
    """The router takes all four workers, and each prefill worker has both pools open."""
    pools = [cluster.metrics(name).value("hawk_prefill_open_pools") for name in ("p0", "p1")]
    return cluster.metrics("r").value("hawk_router_worker_up") == 4 and pools == [2, 2]


async def ask_all(client: Client, answers: list[Answer]) -> list[Outcome]:
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(answer: Answer) -> Outcome:
        async with turns:
            return await client.ask(answer.prompt, stream=False, max_tokens=TOKENS)

    return list(await asyncio.gather(*map(one, answers)))


def assert_right(outcomes: list[Outcome], answers: list[Answer], deployment: Deployment) -> None:
    for outcome, answer in zip(outcomes, answers, strict=True):
        assert outcome.status == 200, outcome.error
        assert outcome.text == answer.text_of(deployment.book, min(TOKENS, len(answer.token_ids)))


async def test_case_23_and_m4_a_dead_worker_of_each_role_loses_no_answer(
    fleet: Cluster, deployment: Deployment, answers: list[Answer]
) -> None:
    wanted = answers[:REQUESTS]
    async with Client(fleet.url("r"), "smol") as client:
        assert_right(await ask_all(client, wanted), wanted, deployment)
        assert all(taken(fleet, name) > 0 for name in ("p0", "p1", "d0", "d1")), "a worker sat idle"

        under_way = asyncio.create_task(ask_all(client, wanted))
        await asyncio.to_thread(eventually, lambda: leases(fleet, "d1") > 0, "d1 is at work", every_s=0.01)
        fleet.kill("d1", signal.SIGKILL)
        fleet.kill("p1", signal.SIGKILL)
        assert_right(await under_way, wanted, deployment)
        assert fleet.ready_status("r") == 200

        fleet.start("d1", "p1")
        await asyncio.to_thread(fleet.wait_ready, "d1", "p1", timeout_s=120)
        await asyncio.to_thread(eventually, lambda: all_open(fleet), "the router uses both again", 60)
        assert_right(await ask_all(client, wanted), wanted, deployment)
        assert taken(fleet, "p1") > 0
        assert taken(fleet, "d1") > 0
    for name in ("d0", "d1"):
        await asyncio.to_thread(eventually, lambda name=name: leases(fleet, name) == 0, f"{name} is idle")
