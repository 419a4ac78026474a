"""Settings of the prefill role that contradict the machine or the model are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prefill_worker.settings import PrefillSettings, parse_cpus
from transport.errors import ConfigurationError
from transport.settings import load

ENV = {"HAWK_TOKEN": "a-token-long-enough"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 10}))
    return directory


def test_the_defaults_need_a_model_only(model: Path) -> None:
    settings = load(PrefillSettings, ["--model", str(model)], env=ENV)
    assert settings.model_name == "tiny-model"
    assert settings.omp_threads >= 1


def test_threads_and_cpus(model: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    flags = ["--model", str(model), f"--cpus={cpu}"]
    assert load(PrefillSettings, flags, env=ENV).omp_threads == 1
    assert load(PrefillSettings, [*flags, "--threads=3"], env=ENV).omp_threads == 3


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--block-size=40", "block_size: must be a multiple of 16"),
        ("--kv-cache-gib=0", "kv_cache_gib"),
        ("--cpus=0-x", "cpus"),
        ("--cpus=9999", "9999"),
        ("--max-num-seqs=0", "max_num_seqs"),
        ("--dtype=int8", "dtype"),
        ("--blocksize=32", "blocksize"),
    ],
)
def test_bad_settings_are_named(model: Path, flag: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load(PrefillSettings, ["--model", str(model), flag], env=ENV)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        load(PrefillSettings, ["--model", str(tmp_path)], env=ENV)


def test_cpu_lists() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert parse_cpus(",".join(map(str, cpus))) == set(cpus)
    assert parse_cpus(f"{cpus[0]}-{cpus[0]}") == {cpus[0]}
    for text in ("", "a", "1-", "-1"):
        with pytest.raises(ValueError, match="cpus"):
            parse_cpus(text)
