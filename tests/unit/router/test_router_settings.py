"""The router's own settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.app import Router
from router.settings import RouterSettings
from transport.errors import ConfigurationError
from transport.settings import load

ENV = {"HAWK_TOKEN": "secret"}


def test_workers_as_flags_and_environment() -> None:
    flags = ["--model", "/m", "--prefill", "http://a:1", "--prefill", "http://b:2/", "--decode", "http://c:3"]
    settings = load(RouterSettings, flags, env=ENV)
    assert (settings.prefill, settings.decode, settings.port) == (["http://a:1", "http://b:2"], ["http://c:3"], 8000)
    env = ENV | {"HAWK_ROUTER_MODEL": "/models/m", "HAWK_ROUTER_DECODE": "http://a:1,http://b:1"}
    settings = load(RouterSettings, [], env=env)
    assert (settings.decode, settings.model_name) == (["http://a:1", "http://b:1"], "m")


@pytest.mark.parametrize(
    "flags",
    [["--prefill", "a:1"], ["--prefill", "http://a:1", "--decode", "http://a:1"], ["--max-concurrent", "0"]],
)
def test_wrong_settings_are_named(flags: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=flags[0].strip("-").replace("-", "_")):
        load(RouterSettings, ["--model", "/m", *flags], env=ENV)


def test_an_unusable_model_directory_is_refused_at_start(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        Router(RouterSettings.model_validate({"model": tmp_path, "token": "t"}))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ConfigurationError, match="generation_config"):
        Router(RouterSettings.model_validate({"model": tmp_path, "token": "t"}))


def test_the_models_own_sampling_defaults_apply(tmp_path: Path, model_dir: Path) -> None:
    from router.openai.schemas import CompletionRequest, parse

    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "do_sample": true}')
    renderer = Router(RouterSettings.model_validate({"model": tmp_path, "token": "t"})).services.renderer
    sampling = renderer.sampling(parse(CompletionRequest, {"prompt": "x", "top_p": 0.3}), 5, 0, None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.3, 0)
    request = parse(CompletionRequest, {"prompt": "x", "temperature": 0.3, "seed": -1, "top_k": -1})
    sampling = renderer.sampling(request, 5, 0, None)
    assert (sampling.temperature, sampling.seed, sampling.top_k) == (0.3, 2**63 - 1, 0)
