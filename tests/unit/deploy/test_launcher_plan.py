"""`hawk up`: what it would start, and what it refuses to start."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from deploy import machine
from deploy.launcher import checks
from deploy.launcher.plan import Member, cpu_shares, plan
from deploy.launcher.settings import UpSettings
from deploy.machine import GIB
from transport.errors import ConfigurationError
from transport.settings import load


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(bytes(2000))
    return directory


def up(model: Path, *argv: str, env: dict[str, str] | None = None) -> UpSettings:
    return load(UpSettings, ["--model", str(model), *argv], env=env or {})


def planned(model: Path, *argv: str, env: dict[str, str] | None = None, cpus: tuple[int, ...] = (0, 1)) -> list[Member]:
    return plan(up(model, *argv, env=env), env or {}, cpus, None)


def by_name(members: list[Member]) -> dict[str, Member]:
    return {member.name: member for member in members}


# ---- ports and names


def test_one_of_each_by_default(model: Path) -> None:
    members = by_name(planned(model))
    assert {name: member.url for name, member in members.items()} == {
        "decode-0": "http://127.0.0.1:8200",
        "prefill-0": "http://127.0.0.1:8100",
        "router": "http://127.0.0.1:8000",
    }


def test_more_workers_on_another_port(model: Path) -> None:
    members = by_name(planned(model, "--prefill", "2", "--decode", "3", "--port", "9000"))
    assert [members[f"decode-{i}"].port for i in range(3)] == [9200, 9201, 9202]
    router = members["router"].settings
    assert router.prefill == ["http://127.0.0.1:9100", "http://127.0.0.1:9101"]
    assert len(router.decode) == 3
    assert router.model == model


def test_two_clusters_on_one_host_have_no_name_in_common(model: Path) -> None:
    first, second = planned(model), planned(model, "--port", "9000")
    assert not {member.settings.name for member in first} & {member.settings.name for member in second}
    assert {member.settings.name for member in planned(model, "--name", "lab")} == {
        "lab-decode-0",
        "lab-prefill-0",
        "lab-router",
    }


@pytest.mark.parametrize("flags", [("--decode-port", "8000"), ("--prefill", "64", "--decode-port", "8150")])
def test_overlapping_ports_are_refused(model: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="overlap"):
        up(model, *flags)


@pytest.mark.parametrize("flags", [("--prefill", "0"), ("--decode", "-1"), ("--prefill", "two"), ("--port", "70000")])
def test_senseless_numbers_are_refused_by_name(model: Path, flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=flags[0].removeprefix("--")):
        up(model, *flags)


def test_only_the_router_listens_where_told(model: Path) -> None:
    members = by_name(planned(model, "--host", "0.0.0.0"))
    assert members["router"].settings.host == "0.0.0.0"
    assert members["router"].url == "http://127.0.0.1:8000"
    assert {members[name].settings.host for name in ("prefill-0", "decode-0")} == {"127.0.0.1"}


# ---- settings of the roles


def test_each_run_has_a_token_of_its_own_shared_by_all_roles(model: Path) -> None:
    first, second = planned(model), planned(model)
    tokens = {member.settings.secret for member in first}
    assert len(tokens) == 1
    assert tokens != {member.settings.secret for member in second}
    assert all(len(token) >= 32 for token in tokens)


def test_a_given_token_is_kept(model: Path, tmp_path: Path) -> None:
    given = planned(model, env={"HAWK_TOKEN": "a-token-from-outside"})
    assert {member.settings.secret for member in given} == {"a-token-from-outside"}
    (tmp_path / "token").write_text("a-token-from-a-file\n")
    read = planned(model, "--token-file", str(tmp_path / "token"))
    assert {member.settings.secret for member in read} == {"a-token-from-a-file"}


def test_settings_of_a_role_reach_it(model: Path) -> None:
    members = by_name(planned(model, env={"HAWK_DECODE_CHANNELS": "7", "HAWK_PREFILL_DTYPE": "float32"}))
    assert members["decode-0"].settings.channels == 7
    assert members["prefill-0"].settings.dtype == "float32"


def test_settings_of_the_file_reach_the_roles(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "hawk.toml"
    config.write_text("[up]\ndecode = 2\n[decode]\nchannels = 5\n")
    settings = load(UpSettings, ["--model", str(model), "--config", str(config)], env={})
    members = by_name(plan(settings, {}, (0, 1), str(config)))
    assert members["decode-1"].settings.channels == 5


def test_common_settings_are_handed_to_all_roles(model: Path) -> None:
    members = planned(model, "--max-body-bytes", "1000", "--log-level", "debug")
    assert {member.settings.max_body_bytes for member in members} == {1000}
    assert {member.settings.log_level for member in members} == {"debug"}


def test_a_wrong_setting_of_a_role_is_said_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="HAWK_DECODE_CHANELS"):
        planned(model, env={"HAWK_DECODE_CHANELS": "7"})
    with pytest.raises(ConfigurationError, match="decode: kv_dtype"):  # prefill has a dtype, too: whose is said
        planned(model, env={"HAWK_DECODE_KV_DTYPE": "int3"})


@pytest.mark.parametrize("key", ["HAWK_PREFILL_PORT", "HAWK_ROUTER_DECODE", "HAWK_DECODE_MODEL"])
def test_what_up_decides_itself_cannot_be_set_for_a_role(model: Path, key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        planned(model, env={key: "1"})


# ---- CPUs


@pytest.mark.parametrize(
    ("prefill", "decode", "cpus", "expected"),
    [
        (1, 1, (0, 1), {("prefill", 0): (0,), ("decode", 0): (1,)}),
        (2, 2, (4, 6), {("prefill", 0): (4,), ("decode", 0): (6,), ("prefill", 1): (4,), ("decode", 1): (6,)}),
        (1, 1, (0, 1, 2, 3, 4), {("prefill", 0): (0, 1), ("decode", 0): (2, 3)}),
        (1, 1, (3,), {("prefill", 0): (3,), ("decode", 0): (3,)}),
    ],
)
def test_cpus_are_shared_out(prefill: int, decode: int, cpus: tuple[int, ...], expected: dict[Any, Any]) -> None:
    assert cpu_shares(prefill, decode, cpus) == expected


def test_pinned_workers_use_as_many_threads_as_cpus(model: Path) -> None:
    members = by_name(planned(model, cpus=(0, 1, 2, 3)))
    assert members["decode-0"].settings.threads == len(members["decode-0"].cpus or ()) == 2
    assert members["router"].cpus is None
    loose = by_name(planned(model, "--no-pin", cpus=(0, 1, 2, 3)))
    assert loose["decode-0"].cpus is None


# ---- checks


def test_a_taken_port_is_named_with_a_way_out(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = up(model, "--port", "8000", "--prefill-port", str(port))
        members = [member for member in plan(settings, {}, (0, 1), None) if member.role == "prefill"]
        with pytest.raises(ConfigurationError, match=rf"port {port}, for prefill-0, is taken.*PORT=\d+"):
            checks.check_ports(settings, members)


def test_missing_memory_is_said_by_role_with_a_way_out(model: Path) -> None:
    members = planned(model)
    with pytest.raises(ConfigurationError, match=r"not enough memory.*prefill-0.*HAWK_PREFILL_KV_CACHE_GIB"):
        checks.check_memory(members, GIB)
    checks.check_memory(members, 64 * GIB)


def test_the_estimate_counts_weights_and_kv(model: Path) -> None:
    small = by_name(planned(model, env={"HAWK_DECODE_NUM_BLOCKS": "1", "HAWK_PREFILL_KV_CACHE_GIB": "1"}))
    large = by_name(planned(model, env={"HAWK_DECODE_NUM_BLOCKS": "1001", "HAWK_PREFILL_KV_CACHE_GIB": "3"}))
    block = small["decode-0"].settings.geometry().block_bytes
    assert checks.estimate(large["decode-0"]) - checks.estimate(small["decode-0"]) == 1000 * block
    assert checks.estimate(large["prefill-0"]) - checks.estimate(small["prefill-0"]) == 2 * GIB
    relay = by_name(planned(model, env={"HAWK_DECODE_NUM_BLOCKS": "1001", "HAWK_DECODE_KV_PATH": "relay"}))
    assert checks.estimate(relay["decode-0"]) - checks.estimate(large["decode-0"]) == 1001 * block


def test_a_missing_module_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.MODULES, "prefill", ("no_such_module",))
    with pytest.raises(ConfigurationError, match="no_such_module"):
        checks.check_modules(planned(model))


def test_memory_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_left", lambda: [123])
    assert machine.available_memory() == 123
