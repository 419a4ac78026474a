"""`hawk router|prefill|decode`: the settings of one role, with Hawk's default model filled in, and its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, Field

from deploy.model import DEFAULT, resolve
from transport.settings import BaseRoleSettings, load

S = TypeVar("S", bound=BaseRoleSettings)

#: a model directory, or the name of a model that Hawk sets up by itself
ModelPath = Annotated[Path, BeforeValidator(lambda value: resolve(str(value)))]


def with_default_model(cls: type[S]) -> type[S]:
    """The role's settings class, but `model` may be a name that `deploy.model` knows, and need not be given."""

    class WithModel(cls):  # type: ignore[misc, valid-type]
        __doc__ = cls.__doc__
        model: ModelPath = Field(
            Path(DEFAULT), validate_default=True, description=f"model directory, or a name as {DEFAULT}"
        )

    WithModel.__name__ = cls.__name__
    return cast("type[S]", WithModel)


def settings_of(role: str, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Any:
    """The settings of `role` from flags, environment and file. Raises ConfigurationError that names what is wrong."""
    return load(with_default_model(_settings_class(role)), argv, env=env)


def _settings_class(role: str) -> type[BaseRoleSettings]:
    match role:
        case "router":
            from router.settings import RouterSettings

            return RouterSettings
        case "prefill":
            from prefill_worker.settings import PrefillSettings

            return PrefillSettings
        case "decode":
            from decode_worker.settings import DecodeSettings

            return DecodeSettings
    raise ValueError(f"no role {role!r}")


def router(argv: Sequence[str]) -> None:
    settings = settings_of("router", argv)
    from router.app import run

    run(settings)


def prefill(argv: Sequence[str]) -> None:
    settings = settings_of("prefill", argv)
    from prefill_worker.app import run

    run(settings)


def decode(argv: Sequence[str]) -> None:
    settings = settings_of("decode", argv)
    from decode_worker.app import run

    run(settings)
