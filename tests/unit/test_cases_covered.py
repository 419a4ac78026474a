"""Each acceptance case (what users of such systems ran into) has a test that bears its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NUMBERS = (
    *(1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 22, 25, 30, 33, 34, 39, 41, 42, 45),
    *(51, 52, 53, 55, 56, 61, 67, 69),
)
CASES = (*map(str, NUMBERS), "m3", "m5", "m6")
NAME = re.compile(r"def test_case_(m?\d+(?:_and_m?\d+)*)_\w+\(", re.IGNORECASE)


def covered() -> set[str]:
    """Case numbers in the names of all tests: `test_case_07_…`, `test_case_55_and_56_…`."""
    found: set[str] = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        for numbers in NAME.findall(path.read_text()):
            found.update(re.sub(r"^(m?)0*", r"\1", number) for number in numbers.lower().split("_and_"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_case_has_a_named_test(case: str) -> None:
    assert case in covered(), f"no test is named test_case_{case.zfill(2)}_…"
