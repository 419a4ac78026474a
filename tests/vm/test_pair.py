"""What two machines show: the programs in pair/, each run by two guests on one wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.vm, pytest.mark.timeout(300)]


def test_perftest_writes_over_the_wire(run_pair: Callable[[str], None]) -> None:
    run_pair("perftest_write")


def test_whole_requests_land_and_a_fence_holds_across_the_wire(run_pair: Callable[[str], None]) -> None:
    run_pair("whole_request")
