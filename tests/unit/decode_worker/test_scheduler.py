"""Continuous batching: who is in which step, exact token counts, preemption, cancels in mid-step."""

from __future__ import annotations

import asyncio
import threading

import pytest
from decode_fakes import BLOCK, MODEL, Bench

from decode_worker.engines.scripted import continuation
from decode_worker.leases import LeaseLimits
from transport.errors import Overloaded
from transport.messages import PreemptedNotice, Tokens

PROMPT = [3, 1, 4, 1, 5]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % 90 for i in range(length)]


@pytest.mark.parametrize("channels", [8, 7])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 100])
async def test_tokens_are_what_the_cache_says_across_block_edges(length: int, channels: int) -> None:
    async with Bench(channels=channels) as bench:
        router = await bench.router()
        await bench.serve(router, "r", prompt(length), token=5, max_tokens=70)
        assert await router.ended("r") == "length"
        assert router.tokens("r") == continuation(prompt(length), 5, 69)
        await bench.idle()


async def test_case_39_exactly_max_tokens_with_the_handed_over_one_counted() -> None:
    async with Bench() as bench:
        router = await bench.router()
        for n in (2, 3, 10):
            await bench.serve(router, f"r{n}", PROMPT, max_tokens=n)
            assert await router.ended(f"r{n}") == "length"
            assert len(router.tokens(f"r{n}")) == n - 1


async def test_after_a_preemption_the_tokens_generated_before_count() -> None:
    async with Bench() as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", PROMPT)
        bench.push(lease, PROMPT)
        await bench.decode(router, lease, "r", 5, generated=6, max_tokens=8)
        assert await router.ended("r") == "length"
        assert len(router.tokens("r")) == 2


async def test_case_41_a_first_token_that_ends_the_request_gets_no_token_more() -> None:
    async with Bench(eos=[5]) as bench:
        router = await bench.router()
        await bench.serve(router, "eos", PROMPT, token=5, ignore_eos=False)
        await bench.serve(router, "stop", PROMPT, token=6, stop_token_ids=(6,))
        lease = await bench.reserve(router, "full", PROMPT)
        bench.push(lease, PROMPT)
        await bench.decode(router, lease, "full", 7, generated=8, max_tokens=8)
        for name, reason in [("eos", "stop"), ("stop", "stop"), ("full", "length")]:
            assert await router.ended(name) == reason
            assert router.tokens(name) == []
        await bench.idle()
        assert bench.engine.steps == 0


async def test_eos_ends_unless_ignored_and_is_part_of_the_tokens() -> None:
    expected = continuation(PROMPT, 5, 7)
    eos = expected[3]
    assert eos not in expected[:3]
    async with Bench(eos=[eos]) as bench:
        router = await bench.router()
        await bench.serve(router, "a", PROMPT, ignore_eos=False)
        assert await router.ended("a") == "stop"
        assert router.tokens("a") == expected[:4]
        await bench.serve(router, "b", PROMPT, ignore_eos=True)
        assert await router.ended("b") == "length"
        assert router.tokens("b") == expected


async def test_case_50_a_stop_token_ends_the_request_even_where_eos_is_ignored() -> None:
    expected = continuation(PROMPT, 5, 7)
    async with Bench() as bench:
        router = await bench.router()
        await bench.serve(router, "r", PROMPT, stop_token_ids=(expected[2],), ignore_eos=True)
        assert await router.ended("r") == "stop"
        assert router.tokens("r") == expected[:3]


async def test_the_context_limit_ends_a_request() -> None:
    async with Bench(model=MODEL.model_copy(update={"max_model_len": 64})) as bench:
        router = await bench.router()
        lease = await bench.reserve(router, "r", prompt(60), 4)
        bench.push(lease, prompt(60))
        await bench.decode(router, lease, "r", 5, max_tokens=100)
        assert await router.ended("r") == "length"
        assert router.tokens("r") == continuation(prompt(60), 5, 3)  # 60 + 1 + 3 = 64


async def test_requests_join_and_leave_between_steps() -> None:
    async with Bench() as bench:
        bench.engine.gate = threading.Semaphore(0)
        router = await bench.router()
        await bench.serve(router, "a", prompt(5), max_tokens=6)
        await bench.serve(router, "b", prompt(6), max_tokens=20)
        bench.engine.gate.release(2)
        await router.until(lambda: len(router.tokens("b")) == 2)
        await bench.serve(router, "c", prompt(7), max_tokens=3)
        bench.engine.gate.release(100)
        for name, length, count in [("a", 5, 5), ("b", 6, 19), ("c", 7, 2)]:
            await router.ended(name)
            assert router.tokens(name) == continuation(prompt(length), 5, count)
        sizes = [len(b.tokens) for b in bench.engine.batches]
        assert max(sizes) == 3
        assert sizes[-1] == 1


async def test_at_most_max_batch_rows_and_the_rest_waits_its_turn() -> None:
    async with Bench(max_batch=2) as bench:
        router = await bench.router()
        for i in range(5):
            await bench.serve(router, f"r{i}", prompt(4, i), max_tokens=6)
        for i in range(5):
            await router.ended(f"r{i}")
            assert router.tokens(f"r{i}") == continuation(prompt(4, i), 5, 5)
        assert max(len(b.tokens) for b in bench.engine.batches) == 2


async def test_one_frame_per_step_and_router() -> None:
    async with Bench() as bench:
        bench.engine.gate = threading.Semaphore(0)
        one, two = await bench.router(), await bench.router()
        await bench.serve(one, "first", prompt(4), max_tokens=2)
        for router, names in [(one, "ab"), (two, "cd")]:
            for name in names:
                await bench.serve(router, name, prompt(4), max_tokens=2)
        bench.engine.gate.release(10)
        await two.ended("d")
        together = [m for m in one.of(Tokens) if {i.request_id for i in m.items} >= {"a", "b"}]
        assert len(together) == 1
        assert [{i.request_id for i in m.items} for m in two.of(Tokens)] == [{"c", "d"}]


async def test_case_10_a_cancel_in_mid_step_takes_effect_after_it() -> None:
    async with Bench() as bench:
        bench.engine.gate = threading.Semaphore(0)
        router = await bench.router()
        lease = await bench.serve(router, "r", PROMPT, max_tokens=50)
        other = await bench.serve(router, "other", prompt(9), max_tokens=50)
        bench.engine.gate.release()
        await router.until(lambda: router.tokens("other"))
        while not bench.worker.scheduler.stepping_for:
            await asyncio.sleep(0)
        held = bench.pool.blocks.held
        bench.worker.leases.finish(bench.worker.leases.get(lease.id), "cancelled")
        assert bench.pool.blocks.held == held  # the step may still write into them
        seen = len(router.tokens("r"))
        bench.engine.gate.release()
        await router.until(lambda: len(router.tokens("other")) == 2)
        assert bench.worker.leases.get(lease.id) is None
        assert bench.pool.blocks.held == len(other.block_ids)
        bench.engine.gate.release(100)
        await router.ended("other")
        assert router.tokens("other") == continuation(prompt(9), 5, 49)
        assert len(router.tokens("r")) == seen


async def test_blocks_that_decoding_filled_are_shared_too() -> None:
    async with Bench() as bench:
        router = await bench.router()
        await bench.serve(router, "r", prompt(40), token=5, max_tokens=60)
        await router.ended("r")
        whole = [*prompt(40), 5, *router.tokens("r")]
        lease = await bench.reserve(router, "next", whole)
        assert lease.resident_tokens == 96  # 100 tokens, the last never cached: three full blocks
        bench.push(lease, whole)
        await bench.decode(router, lease, "next", 7, max_tokens=5)
        await router.ended("next")
        assert router.tokens("next") == continuation(whole, 7, 4)


# ---- preemption


async def test_case_38_the_latest_request_gives_way_and_is_told() -> None:
    async with Bench(num_blocks=5) as bench:
        bench.engine.gate = threading.Semaphore(0)
        router = await bench.router()
        await bench.serve(router, "old", prompt(60, 1), max_tokens=40)
        await bench.serve(router, "new", prompt(60, 2), max_tokens=40)
        bench.engine.gate.release(1000)
        assert await router.ended("new") == "preempted"
        assert await router.ended("old") == "length"
        assert router.tokens("old") == continuation(prompt(60, 1), 5, 39)
        assert router.tokens("new") == continuation(prompt(60, 2), 5, 39)[: len(router.tokens("new"))]
        await bench.idle()
        assert bench.metric("hawk_decode_preemptions_total") == 1


async def test_case_38_preemption_is_bounded_and_every_request_completes() -> None:
    """A pool for two of eight requests; the router prefills the victims again, prompt and tokens so far."""
    limits = LeaseLimits(ttl_s=30, max_hold_s=100, watermark=0.1)
    async with Bench(num_blocks=10, max_batch=8, limits=limits) as bench:
        router = await bench.router()

        async def client(i: int) -> int:
            name, text, wanted, preempted = f"r{i}", prompt(40, i), 120, 0
            token, out = 5, [5]
            while True:
                lease = await admitted(name, text + out[:-1], wanted - len(out) + 1, preempted)
                bench.push(lease, text + out[:-1])
                before = len(router.tokens(name))
                notices = len(router.of(PreemptedNotice, name))
                await bench.decode(router, lease, name, token, generated=len(out), max_tokens=wanted)
                await router.until(
                    lambda n=notices: router.finish(name) or len(router.of(PreemptedNotice, name)) > n, timeout=20
                )
                out += router.tokens(name)[before:]
                if router.finish(name):
                    assert out == [5, *continuation(text, 5, wanted - 1)]
                    return preempted
                preempted += 1
                # The new prefill yields the next token.
                token = continuation(text, 5, len(out))[-1]
                out.append(token)

        async def admitted(name: str, text: list[int], left: int, preempted: int):
            while True:
                try:
                    return await bench.reserve(router, name, text, left, preemptions=preempted)
                except Overloaded:
                    router.arrived.clear()
                    await router.arrived.wait()

        counts = await asyncio.wait_for(asyncio.gather(*(client(i) for i in range(8))), 60)
        assert max(counts) <= 3
        assert sum(counts) == bench.metric("hawk_decode_preemptions_total")
        await bench.idle()
        assert bench.pool.blocks.available == 10


async def test_a_step_covers_only_the_blocks_in_use() -> None:
    async with Bench() as bench:
        router = await bench.router()
        await bench.serve(router, "r", prompt(40), max_tokens=3)
        await router.ended("r")
        assert bench.engine.batches[0].block_tables.shape == (1, 40 // BLOCK + 1)


async def test_a_row_of_no_numbers_ends_its_request_only_and_its_blocks_are_not_shared() -> None:
    async with Bench() as bench:
        router = await bench.router()
        bench.engine.poison = {6}
        await bench.serve(router, "good", prompt(40, 1), token=5, max_tokens=4)
        await bench.serve(router, "bad", prompt(40, 2), token=6, max_tokens=4)
        assert await router.ended("bad") == "engine_failed"
        assert await router.ended("good") == "length"
        await bench.idle()
        assert (await bench.reserve(router, "good again", prompt(40, 1))).resident_tokens == BLOCK
        assert (await bench.reserve(router, "bad again", prompt(40, 2))).resident_tokens == 0
