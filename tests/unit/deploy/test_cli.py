"""The `hawk` command: what it prints, what it exits with, what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deploy import cli
from transport.errors import ConfigurationError, EngineFailed


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_names_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli.COMMANDS)
    assert all(name in text for name in cli.BENCHMARKS)


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: hawk COMMAND" in capsys.readouterr().out


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    assert "unknown command 'serve'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["router", "prefill", "decode", "up"])
def test_an_unknown_flag_is_refused_by_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--no-such-flag", "1"]) == 1
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [(ConfigurationError("port 1 is taken"), "hawk: port 1 is taken"), (EngineFailed("gone"), "engine_failed: gone")],
)
def test_errors_become_one_line_and_status_1(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: list[str]) -> int:
        raise error

    monkeypatch.setattr("deploy.doctor.main", fail)
    assert cli.main(["doctor"]) == 1
    assert said in capsys.readouterr().err


def test_a_reader_that_left_is_no_error_to_report() -> None:
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_bench_without_a_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    assert "transfer" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from deploy.cli import main; main(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "vllm", "numpy", "pydantic", "fastapi", "httpx"}
