"""`hawk bench serve` runs as documented: both systems start, every cell of the report is filled, nothing stays.

It asserts no speed: the figures of a short run on shared cores say nothing. See docs/performance.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
TINY = {"--prompt-tokens": 40, "--output-tokens": 4, "--requests": 1, "--rounds": 1}


def test_bench_serve_reports_both_systems(tmp_path: Path) -> None:
    flags = ["--json", "--logs", str(tmp_path), "--concurrency", "1", "2"]
    flags += [str(part) for pair in TINY.items() for part in pair]
    if given := os.environ.get("HAWK_TEST_MODEL"):
        flags += ["--model", given]
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "bench", "serve", *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=260)
    finally:
        process.kill()
    assert process.returncode == 0, err[-4000:]
    report = json.loads(out)
    cells = {(row["system"], row["load"], row["concurrency"]) for row in report["results"]}
    assert cells == {(s, *c) for s in ("vllm", "hawk") for c in (("wave", 1), ("wave", 2), ("closed", 2))}
    for row in report["results"]:
        assert row["ttft_ms_p50"] > 0
        assert row["tpot_ms_p50"] > 0
        assert row["tokens_per_s"] > 0
    assert [(r["load"], r["concurrency"]) for r in report["ratios"]] == [("wave", 1), ("wave", 2), ("closed", 2)]
    for process_name in ("vllm-server", "hawk-router", "hawk-prefill", "hawk-decode"):
        assert (tmp_path / f"{process_name}.log").exists()
    left = {p.pid for p in psutil.process_iter() if _environment(p).get("HAWK_DECODE_SOCKET_DIR") == str(tmp_path)}
    assert not left, "roles outlived the benchmark"


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return {}
