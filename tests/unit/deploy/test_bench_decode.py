"""What `hawk bench decode` accepts and prints; the measurement itself needs vLLM."""

from __future__ import annotations

import pytest

from deploy.bench.decode import parse, table


@pytest.mark.parametrize("flag", ["--context", "--steps", "--rounds", "--threads", "--batch"])
def test_sizes_below_one_are_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([flag, "0"])
    assert flag in capsys.readouterr().err


def test_the_table_has_one_line_per_engine_and_batch() -> None:
    row = {"engine": "hawk", "batch": 8, "step_ms": 50.0, "step_ms_min": 49.0, "tokens_per_s": 160.0}
    lines = table([row | {"ratio_to_vllm": 1.6}]).splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["hawk", "8", "50.0", "49.0", "160.0", "1.60"]
