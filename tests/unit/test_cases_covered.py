"""Each acceptance case (what users of such systems ran into) has a test that bears its number.

The cases that depend on how bytes travel have one that runs on RDMA, in a guest.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from vm.in_guest import FILES, SHARED  # noqa: E402

NUMBERS = (
    *(1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 22, 25, 27, 29, 30, 33, 34, 35, 39, 41, 42, 45),
    *(51, 52, 53, 55, 56, 61, 67, 69),
)
CASES = (*map(str, NUMBERS), "m3", "m5", "m6")
ON_VERBS = tuple(map(str, (9, 18, 19, 20, 21, 22, 27, 29, 33, 35)))
NAME = re.compile(r"test_case_(m?\d+(?:_and_m?\d+)*)_\w+", re.IGNORECASE)
NOT_ON_VERBS = "sorted(MAPPED)"
"""How a shared test says that it is of the data planes that map memory."""


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def runs_on_verbs(test: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> bool:
    """Of the files that guests run: all of guest/, and of the shared ones what takes the data plane as a parameter."""
    if path not in SHARED:
        return True
    arguments = {argument.arg for argument in test.args.args}
    decorators = " ".join(ast.unparse(decorator) for decorator in test.decorator_list)
    return bool(arguments & {"backend", "pool", "plane"}) and NOT_ON_VERBS not in decorators


def numbers(names: Iterable[str]) -> set[str]:
    """Case numbers in the names of tests: `test_case_07_…`, `test_case_55_and_56_…`."""
    found = (match[1].lower().split("_and_") for match in map(NAME.fullmatch, names) if match)
    return {re.sub(r"^(m?)0*", r"\1", number) for several in found for number in several}


@pytest.fixture(scope="module")
def covered() -> set[str]:
    return numbers(test.name for path in TESTS.rglob("test_*.py") for test in functions_of(path))


@pytest.fixture(scope="module")
def covered_on_verbs() -> set[str]:
    return numbers(test.name for path in FILES.values() for test in functions_of(path) if runs_on_verbs(test, path))


@pytest.mark.parametrize("case", CASES)
def test_case_has_a_named_test(case: str, covered: set[str]) -> None:
    assert case in covered, f"no test is named test_case_{case.zfill(2)}_…"


@pytest.mark.parametrize("case", ON_VERBS)
def test_case_has_a_named_test_on_verbs(case: str, covered_on_verbs: set[str]) -> None:
    assert case in covered_on_verbs, (
        f"no test that runs on verbs is named test_case_{case.zfill(2)}_…: tests/vm/in_guest.py lists their files"
    )


def test_what_does_not_run_on_verbs_does_not_count() -> None:
    """Of the contract: a test of mapped memory only."""
    [contract] = [path for path in SHARED if path.stem == "test_backend_contract"]
    run = {test.name: runs_on_verbs(test, contract) for test in functions_of(contract)}
    assert not run["test_case_09_a_fence_waits_for_the_open_chunk"]
    assert run["test_case_09_bytes_of_the_next_owner_survive_many_fences"]
