"""Settings: where a value may come from, which source wins, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from transport.errors import ConfigurationError
from transport.settings import BaseRoleSettings, is_loopback, load

ENV = {"HAWK_TOKEN": "t0ken"}


class Settings(BaseRoleSettings):
    """Decode worker of the tests."""

    role: ClassVar[str] = "decode"

    port: int = Field(8200, ge=0, le=65535, description="port to listen on")
    peers: list[str] = Field([], description="a list")


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hawk.toml"
    path.write_text(text)
    return str(path)


def refused(*argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(Settings, argv, env=ENV if env is None else env)
    return caught.value.message


# ---- sources ---------------------------------------------------------------------------------------


def test_defaults() -> None:
    settings = load(Settings, env=ENV)
    assert (settings.host, settings.port, settings.secret) == ("127.0.0.1", 8200, "t0ken")
    assert settings.name.startswith("decode-")
    assert settings.name.endswith("-8200")


def test_flags_over_environment_over_file(tmp_path: Path) -> None:
    config = file(tmp_path, 'log_level = "error"\n[decode]\nport = 1\nping_interval_s = 0.5\ndead_after_s = 9.0\n')
    env = {**ENV, "HAWK_DECODE_PORT": "2", "HAWK_DECODE_DEAD_AFTER_S": "8"}
    settings = load(Settings, ["--config", config, "--port", "3"], env=env)
    assert (settings.port, settings.dead_after_s, settings.ping_interval_s) == (3, 8.0, 0.5)
    assert settings.log_level == "error"
    assert load(Settings, env={**env, "HAWK_CONFIG": config}).port == 2


def test_the_roles_own_variable_wins_over_the_shared_one() -> None:
    env = {**ENV, "HAWK_LOG_LEVEL": "error", "HAWK_DECODE_LOG_LEVEL": "debug"}
    assert load(Settings, env=env).log_level == "debug"
    assert load(Settings, env={**ENV, "HAWK_LOG_LEVEL": "error"}).log_level == "error"


@pytest.mark.parametrize("value", ["a,b", "a, b", '["a", "b"]'])
def test_lists_in_the_environment(value: str) -> None:
    assert load(Settings, env={**ENV, "HAWK_DECODE_PEERS": value}).peers == ["a", "b"]


def test_lists_as_flags() -> None:
    assert load(Settings, ["--peers", "a", "--peers", "b"], env=ENV).peers == ["a", "b"]
    assert load(Settings, ["--peers", "a,b"], env=ENV).peers == ["a", "b"]


def test_overrides_win() -> None:
    assert load(Settings, ["--port", "1"], env=ENV, overrides={"port": 5}).port == 5


# ---- what is unknown or wrong ----------------------------------------------------------------------


def test_unknown_settings_are_refused_by_name(tmp_path: Path) -> None:
    assert "--prot" in refused("--prot", "1")
    assert "--port" in refused("--bogus", "1")  # the valid ones are listed
    assert "HAWK_DECODE_PROT" in refused(env={**ENV, "HAWK_DECODE_PROT": "1"})
    for text, name in [("[decode]\nprot = 1", "prot"), ("port = 1", "port"), ("[decoder]\nport = 1", "decoder")]:
        message = refused("--config", file(tmp_path, text))
        assert f"unknown setting {name}" in message
        assert "hawk.toml" in message


def test_what_looks_like_a_valid_name_is_suggested(tmp_path: Path) -> None:
    assert "did you mean --log-level?" in refused("--loglevel", "info")
    assert "did you mean HAWK_DECODE_PORT?" in refused(env={**ENV, "HAWK_DECODE_PROT": "1"})
    assert "did you mean decode?" in refused("--config", file(tmp_path, "[decod]\nport = 1"))
    assert "did you mean log_json?" in refused("--config", file(tmp_path, "[decode]\nlogjson = 1"))
    assert "did you mean" not in refused("--bogus", "1")


def test_settings_of_other_roles_are_not_ours(tmp_path: Path) -> None:
    config = file(tmp_path, "[prefill]\nwhatever = 1\n")
    assert load(Settings, ["--config", config], env={**ENV, "HAWK_PREFILL_WHATEVER": "1"}).port == 8200


@pytest.mark.parametrize("text", ["[decode", "decode = 1", "\x00"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    assert "hawk.toml" in refused("--config", file(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    assert "/nowhere.toml" in refused("--config", "/nowhere.toml")


def test_a_wrong_value_names_setting_and_source() -> None:
    assert "port" in refused("--port", "x")
    message = refused(env={**ENV, "HAWK_DECODE_PORT": "70000"})
    assert "port: Input should be less than or equal to 65535" in message
    assert "(from environment)" in message


def test_contradictions_are_refused() -> None:
    assert "dead_after_s: must be at least twice ping_interval_s" in refused("--ping-interval-s", "4")


# ---- the token -------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [{}, {"HAWK_TOKEN": ""}])
def test_no_role_starts_without_a_token(env: dict[str, str]) -> None:
    assert "token: there is none; set HAWK_TOKEN" in refused(env=env)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "node-7"])
def test_other_machines_need_a_token_of_some_length(host: str) -> None:
    assert host in refused("--host", host)
    assert load(Settings, ["--host", host], env={"HAWK_TOKEN": "x" * 16}).host == host


def test_the_token_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from-file\n")
    assert load(Settings, ["--token-file", str(path)], env={}).secret == "from-file"
    assert load(Settings, ["--token-file", str(path)], env=ENV).secret == "from-file"  # a flag is nearer
    config = file(tmp_path, f'token_file = "{path}"')
    assert load(Settings, ["--config", config], env=ENV).secret == "t0ken"


def test_a_token_file_that_is_missing_is_named() -> None:
    assert "/nowhere" in refused("--token-file", "/nowhere", env={})


def test_a_token_is_no_flag_and_never_printed() -> None:
    for argv in (["--token", "s3cret"], ["--token=s3cret"]):
        message = refused(*argv)
        assert "HAWK_TOKEN" in message
        assert "s3cret" not in message
    assert "s3cret" not in refused("--port", "x", env={"HAWK_TOKEN": "s3cret"})
    assert "s3 cret" not in refused(env={"HAWK_TOKEN": "s3 cret"})
    assert "s3cret" not in repr(load(Settings, env={"HAWK_TOKEN": "s3cret"}))


def test_help_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Settings, ["--help"], env={})
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: hawk decode" in printed
    for name in Settings.model_fields:
        assert (f"--{name.replace('_', '-')} " in printed or f"--{name.replace('_', '-')}," in printed) == (
            name != "token"
        )
    assert all(field.description for field in Settings.model_fields.values())
    assert "8200)" in printed
    assert not any(noise in " ".join(printed.split()) for noise in ("default: None", "default: )", "factory"))


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""))
