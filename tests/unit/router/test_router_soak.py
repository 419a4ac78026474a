"""Many requests at once while workers fail, preempt and refuse, and clients leave: every one ends, none is wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from router_fleet import Fleet, sse

from transport.errors import EngineFailed, LeaseExpired, Overloaded, PushFailed

REQUESTS, AT_ONCE = 200, 16


@pytest.mark.parametrize("seed", [1, 2])
async def test_case_25_every_request_ends_and_nothing_stays(fleet: Fleet, seed: int) -> None:
    dice = random.Random(seed)
    fleet.add_prefill()
    fleet.add_decode(num_blocks=24)
    await fleet.start(prefills_per_worker=3, max_preemptions=1000)
    faults = [EngineFailed("engine"), LeaseExpired("late"), Overloaded("full"), PushFailed("wire")]
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        prompt = "x" * dice.randrange(1, 200) + "a"
        max_tokens = dice.randrange(1, 40)
        expected = "".join(chr(ord("a") + (i + 1) % 26) for i in range(max_tokens))
        leave_after = dice.randrange(1, 12) if dice.random() < 0.3 else None
        async with gate:
            roll = dice.random()
            if roll < 0.1:
                dice.choice(fleet.prefill).failures.append(dice.choice(faults))
            elif roll < 0.15:
                dice.choice(fleet.prefill).push_failures.append(PushFailed("wire"))
            elif roll < 0.25:
                dice.choice(fleet.decode).failures.append(dice.choice(faults))
            elif roll < 0.35:
                dice.choice(fleet.decode).preempt += 1
            if dice.random() < 0.5:
                response = await fleet.complete(prompt, max_tokens=max_tokens)
                if response.status_code == 200:
                    assert response.json()["choices"][0]["text"] == expected
                outcomes[f"whole {response.status_code}"] += 1
                return
            text, events, error = "", 0, None
            body = fleet.body(prompt, max_tokens=max_tokens, stream=True)
            async with fleet.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcomes[f"stream {response.status_code}"] += 1
                    return
                async for event in sse(response):
                    events += 1
                    if event == "[DONE]":
                        assert text == expected
                    elif "error" in event:
                        error = event["error"]["code"]
                    else:
                        text += event["choices"][0]["text"]
                    if events == leave_after:
                        break
            assert expected.startswith(text)
            outcomes["left" if events == leave_after else f"stream {error or 'done'}"] += 1

    await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(REQUESTS))), 60)
    await fleet.until_idle()
    assert [d.free_blocks for d in fleet.decode] == [1024, 24]
    assert sum(outcomes.values()) == REQUESTS
    assert outcomes["whole 200"] > REQUESTS / 4, outcomes
    assert outcomes["left"] > 10, outcomes
