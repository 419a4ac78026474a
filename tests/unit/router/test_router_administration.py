"""`/workers` under an administrator who is quick, careless or hostile."""

from __future__ import annotations

import asyncio

import pytest
from router_fleet import AUTH, Fleet

from router.urls import worker_url


async def test_an_added_alias_does_not_end_the_session_it_is_an_alias_of(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start()
    running = asyncio.create_task(fleet.events(max_tokens=5))
    await fleet.decode[0].until(lambda: bool(fleet.decode[0].rows))
    alias = fleet.hosts[fleet.decode[0]].url.replace("127.0.0.1", "localhost")
    await fleet.http.post("/workers", json={"role": "decode", "url": alias}, headers=AUTH)
    await fleet.until(lambda: fleet.router.registry.decode[1].refused)
    assert "its name" in (fleet.router.registry.decode[1].refused or "")
    fleet.decode[0].steps.set()
    assert (await running)[-1] == "[DONE]"
    assert (await fleet.complete()).status_code == 200


async def test_a_worker_moves_to_another_url(fleet: Fleet) -> None:
    """Added under the new one first, removed under the old one then."""
    await fleet.start()
    old = fleet.hosts[fleet.decode[0]].url
    new = old.replace("127.0.0.1", "localhost")
    await fleet.http.post("/workers", json={"role": "decode", "url": new}, headers=AUTH)
    await fleet.until(lambda: fleet.router.registry.decode[1].refused)
    await fleet.http.delete("/workers", params={"url": old}, headers=AUTH)
    await fleet.until(lambda: [worker.url for worker in fleet.router.registry.decode] == [new])
    await fleet.until(lambda: fleet.router.registry.not_ready() is None)
    assert (await fleet.complete()).status_code == 200


async def test_a_worker_added_again_right_after_its_removal_stays(fleet: Fleet) -> None:
    await fleet.start()
    url = fleet.hosts[fleet.decode[0]].url
    for wait in range(8):
        assert (await fleet.http.delete("/workers", params={"url": url}, headers=AUTH)).status_code == 200
        for _ in range(wait):
            await asyncio.sleep(0)
        added = await fleet.http.post("/workers", json={"role": "decode", "url": url}, headers=AUTH)
        assert added.status_code in (200, 201)
        await fleet.until(fleet.all_open)
        assert (await fleet.complete()).status_code == 200
    assert [worker.url for worker in fleet.router.registry.decode] == [url]
    assert len(fleet.router.registry._tasks) == 2


async def test_removed_added_and_removed_again_while_it_is_busy(fleet: Fleet) -> None:
    fleet.decode[0].steps.clear()
    await fleet.start()
    url = fleet.hosts[fleet.decode[0]].url
    running = asyncio.create_task(fleet.events(max_tokens=5))
    await fleet.decode[0].until(lambda: bool(fleet.decode[0].rows))
    await fleet.http.delete("/workers", params={"url": url}, headers=AUTH)
    await fleet.http.post("/workers", json={"role": "decode", "url": url}, headers=AUTH)
    await fleet.http.delete("/workers", params={"url": url}, headers=AUTH)
    removals = list(fleet.router.registry._removals.values())
    assert len(removals) == 1
    fleet.decode[0].steps.set()
    assert (await running)[-1] == "[DONE]"
    await asyncio.gather(*removals)
    assert fleet.router.registry.decode == []
    assert not fleet.router.registry._removals


async def test_why_a_worker_was_never_reached_is_shown(fleet: Fleet) -> None:
    await fleet.start()
    await fleet.http.post("/workers", json={"role": "prefill", "url": "http://127.0.0.1:1"}, headers=AUTH)
    worker = fleet.router.registry.prefill[1]
    await fleet.until(lambda: worker.client is not None and worker.client.error is not None)
    assert "127.0.0.1:1" in worker.describe()["reason"]


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("HTTP://Host-1:9000/", "http://host-1:9000"),
        ("https://a.b_c.example", "https://a.b_c.example"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("http://10.0.0.7:65535", "http://10.0.0.7:65535"),
    ],
)
def test_worker_urls(url: str, plain: str) -> None:
    assert worker_url(url) == plain


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "h:1",
            "ftp://h:1",
            "http://",
            "http://h:0",
            "http://h:65536",
            "http://h:x",
            "http://h:1/v1",
            "http://h:1//",
        ),
        *(
            "http://u:p@h:1",
            "http://@h:1",
            "http://h:1?",
            "http://h:1#",
            "http://h:1?x=1",
            " http://h:1",
            "http://h:1\n",
        ),
        *("http://h h:1", "http://h\0:1", "http://\u2603:1", "http://h..x:1", "http://-h:1", f"http://{'a' * 64}:1"),
        *(
            f"http://{'a.' * 127}aa:1",
            "http://[::1",
            "http://[::g]:1",
            "http://[1:2]:1",
            "http://h:\uff11",
            "http://h\\@x:1",
        ),
    ],
)
def test_what_is_no_worker_url(url: str) -> None:
    with pytest.raises(ValueError, match="is not a worker URL"):
        worker_url(url)
