"""The assembled decode role: HTTP, session and shared-memory data plane on loopback, with the scripted engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from decode_fakes import reserve

from decode_worker.app import main
from decode_worker.engines.scripted import ScriptedEngine, continuation
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.npu.tenstorrent import opening
from decode_worker.settings import DecodeSettings
from transport import prefix
from transport.backends import connect
from transport.errors import ConfigurationError, EngineFailed
from transport.messages import Cancel, Decode, Failed, Reserved, ResidentBlocks, Sampling, Tokens, Writer
from transport.session.client import SessionClient
from transport.settings import load

TOKEN = "unit-test-token"
WRITER = Writer(worker="p0", generation="pg")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "vocab_size": 97,
    "eos_token_id": 96,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "tiny"


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> dict:
    return {
        "model": model,
        "port": 0,
        "name": "d0",
        "token": TOKEN,
        "kv_dtype": "float32",
        "num_blocks": 16,
        "channels": 7,
        "bank_bytes": 1 << 20,
        "socket_dir": tmp_path / "s",
    }


class Running:
    """A decode role in this process, and a router attached to it."""

    def __init__(self) -> None:
        self.engine: ScriptedEngine | None = None
        self.task: asyncio.Task | None = None
        self.url = ""
        self.received: list = []
        self.arrived = asyncio.Event()
        self.hello: asyncio.Future = asyncio.get_running_loop().create_future()

    def on_message(self, message) -> None:
        self.received.append(message)
        self.arrived.set()

    async def expect(self, kind, check=lambda m: True):
        async def wait():
            while not (found := [m for m in self.received if isinstance(m, kind) and check(m)]):
                self.arrived.clear()
                await self.arrived.wait()
            return found[-1]

        return await asyncio.wait_for(wait(), 5)


@asynccontextmanager
async def running(settings: DecodeSettings):
    role = Running()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def engine(settings, device, pool):
        role.engine = ScriptedEngine(device.host_channels(), pool.geometry, pool.bases)
        return role.engine

    role.task = asyncio.create_task(main(settings, engine, port.set_result))
    await asyncio.wait({role.task, port}, return_when=asyncio.FIRST_COMPLETED)
    if role.task.done():
        role.task.result()
    role.url = f"http://127.0.0.1:{port.result()}"
    client = SessionClient(
        role.url,
        TOKEN,
        "router",
        "rg",
        on_hello=role.hello.set_result,
        on_message=role.on_message,
        on_down=lambda error: None,
    )
    session = asyncio.create_task(client.run())
    role.send = client.send
    try:
        await asyncio.wait_for(asyncio.shield(role.hello), 5)
        yield role
    finally:
        session.cancel()
        role.task.cancel()
        await asyncio.gather(session, role.task, return_exceptions=True)


async def test_a_request_goes_through_all_of_it(arguments: dict) -> None:
    prompt = [(5 * i) % 90 for i in range(70)]
    async with running(DecodeSettings(**arguments)) as role, httpx.AsyncClient(base_url=role.url) as http:
        pool = role.hello.result().pool
        writer = await asyncio.to_thread(connect, pool, WRITER, TOKEN)
        root = prefix.root_hash(pool.model.fingerprint, pool.geometry.dtype)
        hashes = tuple(prefix.block_hashes(prompt, 32, root))
        role.send(reserve("r", prompt, writer=WRITER).model_copy(update={"block_hashes": hashes}))
        lease = (await role.expect(Reserved)).lease
        sampling = Sampling(max_tokens=10, temperature=0, ignore_eos=True)
        role.send(Decode(request_id="r", lease_id=lease.id, token_id=5, generated=1, sampling=sampling))

        def push() -> None:
            with_lease = writer.open(lease)
            with with_lease.chunk():
                remote = ScriptedEngine(with_lease.mapped, pool.geometry, pool.bases)
                for position, token in enumerate(prompt):
                    remote.store(lease.block_ids, position, token)
            with_lease.complete(5)

        await asyncio.to_thread(push)
        await role.expect(Tokens, lambda m: m.items[0].finish_reason is not None)
        tokens = [t for m in role.received if isinstance(m, Tokens) for i in m.items for t in i.token_ids]
        assert tokens == continuation(prompt, 5, 9)
        assert (await role.expect(ResidentBlocks, lambda m: m.added)).added == hashes

        assert (await http.get("/ready")).status_code == 200
        assert (await http.get("/metrics")).status_code == 401
        auth = {"Authorization": f"Bearer {TOKEN}"}
        metrics = (await http.get("/metrics", headers=auth)).text
        assert 'hawk_decode_blocks{state="held"} 0.0' in metrics
        assert 'hawk_decode_leases_ended_total{how="length"} 1.0' in metrics
        assert 'hawk_decode_data_plane_total{event="landed"} 1.0' in metrics
        assert "hawk_decode_landed_seconds_count 1.0" in metrics
        info = (await http.get("/v1/info", headers=auth)).json()
        assert info["pool"]["geometry"]["num_channels"] == 7
        await asyncio.to_thread(writer.close)


async def test_case_16_the_writers_disconnect_is_told_to_the_router(arguments: dict) -> None:
    async with running(DecodeSettings(**arguments)) as role:
        writer = await asyncio.to_thread(connect, role.hello.result().pool, WRITER, TOKEN)
        role.send(reserve("r", [1, 2, 3], writer=WRITER))
        await role.expect(Reserved)
        await asyncio.to_thread(writer.close)
        assert (await role.expect(Failed)).error.code == "push_failed"
        role.send(reserve("r2", [1, 2, 3], writer=WRITER))
        assert (await role.expect(Failed, lambda m: m.request_id == "r2")).error.code == "worker_lost"
        role.send(Cancel(request_id="nobody"))


async def test_an_engine_failure_ends_the_process_with_an_error(arguments: dict, monkeypatch) -> None:
    monkeypatch.setattr("decode_worker.app.FLUSH_S", 0.05)
    async with running(DecodeSettings(**arguments)) as role:
        writer = await asyncio.to_thread(connect, role.hello.result().pool, WRITER, TOKEN)
        role.engine.fail = RuntimeError("broken tile")
        role.send(reserve("r", [1, 2, 3], writer=WRITER))
        lease = (await role.expect(Reserved)).lease
        sampling = Sampling(max_tokens=10, temperature=0)
        role.send(Decode(request_id="r", lease_id=lease.id, token_id=5, generated=1, sampling=sampling))
        await asyncio.to_thread(lambda: writer.open(lease).complete(5))
        assert (await role.expect(Failed)).error.code == "engine_failed"
        with pytest.raises(EngineFailed, match="broken tile"):
            await asyncio.wait_for(role.task, 10)
        await asyncio.to_thread(writer.close)


async def test_a_pool_that_does_not_fit_is_said_at_start(arguments: dict) -> None:
    with pytest.raises(ConfigurationError, match="lower num_blocks or kv_bytes"):
        await main(DecodeSettings(**arguments | {"num_blocks": 10_000}))


# ---- settings


def test_the_pool_takes_as_many_blocks_as_its_bytes_hold(arguments: dict) -> None:
    settings = DecodeSettings(**arguments | {"num_blocks": None, "kv_bytes": 10 * 2 * 4096 + 1})
    assert settings.geometry().num_blocks == 10
    assert settings.model_name == "tiny"


CARD = {"device": "tenstorrent", "engine": "ttnn", "kv_path": "relay"}
SIMULATOR = CARD | {"simulator": True, "engine": "numpy"}


def on(arguments: dict, device: dict) -> dict:
    """`arguments` without what describes the emulated NPU, where the device is another."""
    emulated = () if device.get("device", "emulated") == "emulated" else ("channels", "bank_bytes")
    return {name: value for name, value in arguments.items() if name not in emulated} | device


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 40}, "block_size: must be a multiple of 32, got 40"),
        ({"bank_bytes": 1000}, "bank_bytes: must be a multiple of 64"),
        ({"model": "/nowhere"}, "model: /nowhere has no config.json"),
        ({"lease_ttl_s": 1.0}, "lease_ttl_s: must be at least twice ping_interval_s"),
        ({"kv_dtype": "bfp2"}, "kv_dtype"),
        ({"max_batch": 0}, "max_batch"),
        ({"blocksize": 32}, "blocksize"),
        ({"simulator": True}, "simulator: is a setting of --device tenstorrent"),
        ({"device_id": 1}, "device_id: is a setting of --device tenstorrent"),
        ({"engine": "ttnn"}, "engine: ttnn computes on a Tenstorrent card"),
        (CARD | {"channels": 8}, "channels: describes the emulated NPU"),
        (CARD | {"bank_bytes": 1024}, "bank_bytes: describes the emulated NPU"),
        (CARD | {"engine": "cpu"}, "engine: cpu decodes from memory that the host addresses.*use ttnn, or numpy"),
        (SIMULATOR | {"engine": "cpu"}, "engine: cpu.*use numpy"),
        (SIMULATOR | {"engine": "ttnn"}, "engine: ttnn needs a card's cores"),
        (SIMULATOR | {"device_id": 1}, "device_id: the simulator has one chip, 0, got 1"),
        (CARD | {"kv_path": "contiguous"}, "kv_path: contiguous re-lays out"),
        (SIMULATOR | {"kv_path": "hawk", "transport": "verbs"}, "kv_path: hawk .* simulator has no card; use relay"),
        (CARD | {"kv_path": "hawk"}, "kv_path: hawk .* which transport shm cannot; use relay, or --transport verbs"),
        (CARD | {"kv_path": "hawk", "transport": "nixl", "data_host": "::1"}, "kv_path: hawk .* transport nixl"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments: dict, wrong: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(DecodeSettings, [], env={}, overrides=on(arguments, wrong))


def test_settings_come_from_flags_and_environment(model: Path) -> None:
    env = {"HAWK_TOKEN": TOKEN, "HAWK_DECODE_MODEL": str(model), "HAWK_DECODE_KV_PATH": "host"}
    settings = load(DecodeSettings, ["--block-size", "64", "--channels", "7"], env=env)
    assert (settings.block_size, settings.channels, settings.kv_path, settings.port) == (64, 7, "host", 8200)


@pytest.mark.parametrize("transport", ["shm", "verbs", "nixl"])
def test_a_tenstorrent_device_has_its_own_channels(arguments: dict, transport: str) -> None:
    """Seven on a p100; whatever the transport, relay goes with it, and hawk with RDMA."""
    settings = load(DecodeSettings, [], env={}, overrides=on(arguments, SIMULATOR | {"transport": transport}))
    assert settings.geometry(7).num_channels == 7
    direct = on(arguments, CARD | {"kv_path": "hawk", "transport": "verbs"})
    assert load(DecodeSettings, [], env={}, overrides=direct).geometry(8) == settings.geometry(8)


@pytest.mark.parametrize(
    ("environment", "simulator", "message"),
    [
        ({"TT_METAL_MOCK_CLUSTER_DESC_PATH": "/x.yaml"}, True, "TT_METAL_MOCK_CLUSTER_DESC_PATH is set.*unset it"),
        ({"TT_METAL_MOCK_CLUSTER_DESC_PATH": "/x.yaml"}, False, "TT_METAL_MOCK_CLUSTER_DESC_PATH is set"),
        ({"TT_METAL_SIMULATOR": "/sim"}, False, "TT_METAL_SIMULATOR is set, but not --simulator"),
        ({}, True, "there is no simulator in .*make env-ttnn"),
    ],
)
def test_an_environment_that_names_another_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict, simulator: bool, message: str
) -> None:
    for name in ("TT_METAL_MOCK_CLUSTER_DESC_PATH", "TT_METAL_SIMULATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    installed = {"purelib": str(tmp_path / "lib/python3/site-packages")}
    monkeypatch.setattr(opening.sysconfig, "get_paths", lambda: installed)
    with pytest.raises(ConfigurationError, match=message):
        opening.open_chip(simulator=simulator)


async def test_a_worker_that_cannot_start_closes_its_device(monkeypatch: pytest.MonkeyPatch, arguments: dict) -> None:
    """A simulated chip is a process of its own."""
    closed = []
    monkeypatch.setattr(EmulatedNpu, "close", lambda device: closed.append(device.name))

    def broken(*what: object) -> None:
        raise ConfigurationError("no such engine")

    with pytest.raises(ConfigurationError, match="no such engine"):
        await main(load(DecodeSettings, [], env={}, overrides=arguments), make_engine=broken)
    assert closed == ["emulated"]
