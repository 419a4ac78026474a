"""Logs: one line per record, JSON on demand, and never a secret."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from transport.logging import setup_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("as_json", [False, True])
def test_secrets_never_reach_the_log(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    setup_logging("decode", secrets=["s3cret"], as_json=as_json)
    log = logging.getLogger("any")
    log.info("the token is %s", "s3cret")
    try:
        raise ValueError("Bearer s3cret")
    except ValueError:
        log.exception("failed")
    printed = capsys.readouterr().err
    assert "s3cret" not in printed
    assert printed.count("[secret]") == 3  # message, source line, exception


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("decode", "info", as_json=True)
    logging.getLogger("a.b").warning("line\nbreak")
    logging.getLogger("a.b").debug("not logged")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("Z")
    assert record == {"level": "WARNING", "role": "decode", "logger": "a.b", "message": "line\nbreak"}
