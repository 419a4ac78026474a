"""Which block ranges the connector hands over, step by step, and which blocks stay held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefill_fakes import lease_of

from prefill_worker.connector.scheduler import SchedulerSide
from prefill_worker.connector.step import Step


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


class Driver:
    """Plays vLLM's scheduler: `run(request=(computed, scheduled, new blocks))`."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []
        self.clock = Clock()
        self.side = SchedulerSide(lambda *held: self.held.append(held), self.clock)
        self._known: set[str] = set()

    def add(self, request_id: str, prompt_tokens: int, **lease: Any) -> None:
        params = None
        if lease.pop("hand_over", True):
            params = {"transfer_id": f"t-{request_id}", "lease": lease_of(prompt_tokens, **lease).model_dump()}
        self.side.add(
            SimpleNamespace(request_id=request_id, num_prompt_tokens=prompt_tokens, kv_transfer_params=params)
        )

    def run(
        self, preempted: set[str] | None = None, resumed: set[str] | None = None, **work: tuple[int, int, list[int]]
    ) -> Step:
        new = {r: w for r, w in work.items() if r not in self._known}
        old = {r: w for r, w in work.items() if r in self._known}
        self._known |= work.keys()
        return self.side.step(
            SimpleNamespace(
                preempted_req_ids=preempted or set(),
                num_scheduled_tokens={r: scheduled for r, (_, scheduled, _) in work.items()},
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=r, num_computed_tokens=computed, block_ids=(blocks,))
                    for r, (computed, _, blocks) in new.items()
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(old),
                    resumed_req_ids=resumed or set(),
                    num_computed_tokens=[computed for computed, _, _ in old.values()],
                    new_block_ids=[(blocks,) if blocks else None for _, _, blocks in old.values()],
                ),
            )
        )


@pytest.fixture
def driver() -> Driver:
    return Driver()


def spans(step: Step) -> list[tuple[int, int, bool]]:
    return [(item.blocks.start, item.blocks.stop, item.blocks.last) for item in step.ranges]


def test_case_34_a_chunked_prompt_goes_range_by_range_and_ends(driver: Driver) -> None:
    driver.add("a", 300)
    assert spans(driver.run(a=(0, 100, [4, 5]))) == [(0, 96, False)]
    assert spans(driver.run(a=(100, 100, [6, 7]))) == [(96, 192, False)]
    last = driver.run(a=(200, 100, [8]))
    assert spans(last) == [(192, 300, True)]
    assert last.ranges[0].blocks.blocks == (4, 5, 6, 7, 8)
    assert spans(driver.run(a=(300, 1, []))) == []


def test_case_33_a_chunk_that_completes_no_tile_hands_over_nothing(driver: Driver) -> None:
    driver.add("a", 100)
    assert spans(driver.run(a=(0, 20, [1]))) == []
    assert spans(driver.run(a=(20, 30, []))) == [(0, 32, False)]


def test_blocks_from_the_prefix_cache_go_with_the_first_range(driver: Driver) -> None:
    driver.add("a", 300)
    assert spans(driver.run(a=(256, 44, [1, 2, 3]))) == [(0, 300, True)]


def test_resident_tokens_are_left_out(driver: Driver) -> None:
    driver.add("a", 300, resident_tokens=160)
    assert spans(driver.run(a=(0, 128, [1]))) == []
    assert spans(driver.run(a=(128, 128, [2]))) == [(160, 256, False)]
    assert spans(driver.run(a=(256, 44, [3]))) == [(256, 300, True)]


def test_a_prompt_that_is_all_resident_still_completes(driver: Driver) -> None:
    driver.add("a", 128, resident_tokens=128)
    assert spans(driver.run(a=(0, 128, [1]))) == [(128, 128, True)]


def test_requests_without_a_lease_are_not_pushed_nor_held(driver: Driver) -> None:
    driver.add("a", 64, hand_over=False)
    assert spans(driver.run(a=(0, 64, [1]))) == []
    assert driver.side.finish("a", True, 1)[0] is False
    assert driver.held == []


def test_finished_requests_hold_their_blocks_until_released(driver: Driver) -> None:
    driver.add("a", 64)
    driver.run(a=(0, 64, [1, 2]))
    assert driver.side.finish("a", True, 2)[0] is True
    assert driver.side.holds_blocks
    assert driver.run().cancelled == []
    driver.side.release({"a"})
    assert driver.held == [(1, 2), (0, 0)]
    assert not driver.side.holds_blocks


def test_case_01_an_abort_in_mid_prefill_cancels_the_push(driver: Driver) -> None:
    driver.add("a", 300)
    driver.run(a=(0, 128, [1, 2]))
    assert driver.side.finish("a", False, 2)[0] is True  # a page may be being read: until the worker side says no
    assert driver.run().cancelled == ["t-a"]
    assert driver.run().cancelled == []


def test_case_11_an_abort_before_the_first_range_frees_at_once(driver: Driver) -> None:
    driver.add("a", 300)
    assert driver.side.finish("a", False, 0)[0] is False
    driver.add("b", 300)
    driver.run(b=(0, 16, [1]))
    assert driver.side.finish("b", False, 1)[0] is False
    assert driver.held == []


def test_a_preempted_request_is_pushed_again_from_the_start(driver: Driver) -> None:
    driver.add("a", 300, resident_tokens=32)
    driver.run(a=(0, 128, [1, 2]))
    assert driver.run(preempted={"a"}).rewound == ["a"]
    again = driver.run(resumed={"a"}, a=(0, 128, [7, 8]))
    assert spans(again) == [(32, 128, False)]
    assert again.ranges[0].blocks.blocks == (7, 8)


def test_a_request_preempted_before_its_first_range_has_nothing_to_take_back(driver: Driver) -> None:
    driver.add("a", 300)
    driver.run(a=(0, 16, [1]))
    assert driver.run(preempted={"a"}).rewound == []
    assert spans(driver.run(resumed={"a"}, a=(0, 64, [7]))) == [(0, 64, False)]


def test_timings_come_from_the_schedulers_own_steps(driver: Driver) -> None:
    driver.add("a", 64)
    driver.clock.now += 2
    driver.run(a=(0, 64, [1]))
    driver.clock.now += 3
    assert driver.side.finish("a", True, 1)[1] == {"queue": 2.0, "prefill": 3.0}


def test_unknown_requests_are_left_to_the_engine(driver: Driver) -> None:
    assert driver.side.finish("nobody", True, 3) == (False, None)
    driver.side.release({"nobody"})
    assert not driver.side.holds_blocks


def test_case_64_steps_are_told_once_a_second(driver: Driver) -> None:
    driver.add("a", 300)
    for _ in range(10):
        driver.clock.now += 0.25
        driver.run()
    assert driver.held == [(0, 0), (0, 0)]
