"""Settings of a role: flags over environment over TOML file over defaults; what is unknown is refused by name.

A role subclasses `BaseRoleSettings` and is loaded with `load(cls, argv)`. A field `kv_path` of the decode
role is the flag `--kv-path`, the variable `HAWK_DECODE_KV_PATH`, and the key `kv_path` in the table
`[decode]` of the file. Fields in `SHARED` are the same for all roles of a deployment: they may also be set by
`HAWK_TOKEN` and the like, and at the top of the file.
"""

from __future__ import annotations

import difflib
import inspect
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSuppress,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from transport.errors import ConfigurationError
from transport.session.frames import DEFAULT_MAX_FRAME_BYTES
from transport.session.outbox import DEFAULT_MAX_QUEUE_BYTES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = ("router", "prefill", "decode", "up")
SHARED = ("token", "token_file", "log_level", "log_json")
MIN_TOKEN_CHARS = 16
_NO_DEFAULT = re.compile(r" \(default(: None|: | factory: \w+)\)$")

Seconds = Annotated[float, Field(gt=0, le=86400)]
Bytes = Annotated[int, Field(gt=0)]


class BaseRoleSettings(BaseSettings):
    """What every role has. Subclasses set `role` and a default `port`, and describe each field."""

    model_config = SettingsConfigDict(extra="forbid", hide_input_in_errors=True)

    role: ClassVar[str]

    name: str = Field("", max_length=256, description="unique name of this process (default: ROLE-HOSTNAME-PORT)")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port to listen on")
    token: CliSuppress[SecretStr | None] = Field(None, description="cluster token (HAWK_TOKEN or the file)")
    token_file: Path | None = Field(None, description="file that holds the cluster token")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_json: bool = Field(False, description="log JSON lines")
    metrics_public: bool = Field(False, description="serve /metrics without the token")
    max_body_bytes: Bytes = Field(32 * 1024 * 1024, description="largest request body; over it: HTTP 413")
    body_timeout_s: Seconds = Field(60.0, description="seconds a request body may take to arrive; then: HTTP 408")
    max_frame_bytes: Bytes = Field(DEFAULT_MAX_FRAME_BYTES, description="largest session frame")
    max_queue_bytes: Bytes = Field(DEFAULT_MAX_QUEUE_BYTES, description="unsent bytes after which a peer is dropped")
    ping_interval_s: Seconds = Field(1.0, description="seconds between heartbeats of a session")
    dead_after_s: Seconds = Field(5.0, description="seconds of silence after which a peer counts as dead")
    grace_s: Seconds = Field(30.0, description="seconds to finish running requests at shutdown")

    @property
    def secret(self) -> str:
        """The cluster token in clear; never log it."""
        assert self.token is not None
        return self.token.get_secret_value()

    @model_validator(mode="after")
    def _complete(self) -> BaseRoleSettings:
        if self.token_file is not None and self.token is None:
            try:
                self.token = SecretStr(self.token_file.read_text().strip())
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"token_file: cannot read {self.token_file}: {error}") from error
        if self.token is None or not self.secret:
            raise ValueError("token: there is none; set HAWK_TOKEN, or token_file to a file that holds it")
        if not self.secret.isascii() or not self.secret.isprintable() or " " in self.secret:
            raise ValueError("token: it must be printable ASCII without spaces")
        if not is_loopback(self.host) and len(self.secret) < MIN_TOKEN_CHARS:
            raise ValueError(
                f"token: on {self.host}, which other machines can reach, it must have at least "
                f"{MIN_TOKEN_CHARS} characters"
            )
        if self.dead_after_s < 2 * self.ping_interval_s:
            raise ValueError(
                f"dead_after_s: must be at least twice ping_interval_s ({self.ping_interval_s:g}), "
                f"got {self.dead_after_s:g}"
            )
        if not self.name:
            self.name = f"{self.role}-{socket.gethostname()}-{self.port}"
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load` adds flags, environment and file explicitly."""
        return (init_settings,)


S = TypeVar("S", bound=BaseRoleSettings)


def load(
    cls: type[S],
    argv: Sequence[str] | None = (),
    *,
    env: Mapping[str, str] | None = None,
    prog: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> S:
    """The settings of a role. `--help` prints every field and exits.

    argv: flags (None: `sys.argv[1:]`). env: instead of `os.environ`. overrides: values above all sources.
    Raises ConfigurationError that names each wrong setting and where it was set.
    """
    env = os.environ if env is None else env
    flags = _flags(cls, argv, prog or f"hawk {cls.role}")
    config = flags.pop("config", None) or env.get("HAWK_CONFIG")
    layers = [
        ("flag", flags),
        ("environment", _environment(cls, env)),
        (f"file {config}", _file(cls, Path(config)) if config else {}),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for where, values in [("override", dict(overrides or {})), *layers]:
        if "token" in merged:  # a token set nearer wins over a file set farther, and the other way round
            values.pop("token_file", None)
        if "token_file" in merged:
            values.pop("token", None)
        for key, value in values.items():
            if key not in merged:
                merged[key], origin[key] = value, where
    try:
        return cls(**merged)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False, include_input=False):
            key = str(item["loc"][0]) if item["loc"] else ""
            where = f" (from {origin[key]})" if key in origin else ""
            path = ".".join(str(part) for part in item["loc"])
            lines.append(f"{path}{': ' if path else ''}{item['msg'].removeprefix('Value error, ')}{where}")
        raise ConfigurationError("; ".join(lines)) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# ---- sources ---------------------------------------------------------------------------------------


class _FlagSource(CliSettingsSource[Any]):
    """Flags whose help shows a default once: where the value is computed, the description tells it."""

    def _help_format(self, field_name: str, field_info: FieldInfo, *args: Any, **kwargs: Any) -> str:
        text = super()._help_format(field_name, field_info, *args, **kwargs)
        return _NO_DEFAULT.sub("", text)


def _flags(cls: type[BaseRoleSettings], argv: Sequence[str] | None, prog: str) -> dict[str, Any]:
    args = list(argv) if argv is not None else None
    if args and any(arg == "--token" or arg.startswith("--token=") for arg in args):
        raise ConfigurationError("token: a flag is visible to every user; use HAWK_TOKEN or --token-file")

    class Flags(cls):  # type: ignore[misc, valid-type]
        __doc__ = inspect.cleandoc(cls.__doc__ or "")
        config: Path | None = Field(None, description="TOML file with settings (or HAWK_CONFIG)")

    try:
        source = _FlagSource(
            Flags,
            cli_parse_args=args if args is not None else True,
            cli_prog_name=prog,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_exit_on_error=False,
        )
        return {key: value for key, value in source().items() if value is not None}
    except SettingsError as error:
        names = [f"--{name.replace('_', '-')}" for name in (*cls.model_fields, "config") if name != "token"]
        wrong = [arg.partition("=")[0] for arg in args or () if arg.startswith("--")]
        unknown = [arg for arg in wrong if arg not in names and f"--{arg.removeprefix('--no-')}" not in names]
        raise ConfigurationError(
            f"{error}{_instead(unknown, names)}; valid flags: {', '.join(sorted(names))}"
        ) from None


def _environment(cls: type[BaseRoleSettings], env: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"HAWK_{cls.role.upper()}_"
    fields = {f"{prefix}{name.upper()}": name for name in cls.model_fields}
    unknown = sorted(key for key in env if key.startswith(prefix) and key not in fields)
    if unknown:
        instead = _instead(unknown, fields)
        raise ConfigurationError(f"unknown setting {', '.join(unknown)}{instead}; valid: {', '.join(sorted(fields))}")
    values = {name: env[f"HAWK_{name.upper()}"] for name in SHARED if env.get(f"HAWK_{name.upper()}")}
    values.update({name: env[key] for key, name in fields.items() if key in env})
    return {name: _parse(cls, name, value) for name, value in values.items()}


def _parse(cls: type[BaseRoleSettings], name: str, value: str) -> object:
    """A list may be JSON or comma-separated; pydantic converts plain values from their text."""
    if not isinstance(cls.model_fields[name].get_default(call_default_factory=True), (list, tuple, dict)):
        return value
    if value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ConfigurationError(f"{name}: not valid JSON: {error} (from environment)") from None
    return [part.strip() for part in value.split(",") if part.strip()]


def _file(cls: type[BaseRoleSettings], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"config: cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"config: {path} is not valid TOML: {error}") from None
    top = {key: value for key, value in content.items() if key not in SECTIONS}
    unknown = sorted(set(top) - set(SHARED))
    if unknown:
        raise ConfigurationError(
            f"unknown setting {', '.join(unknown)} in {path}{_instead(unknown, (*SHARED, *SECTIONS))}; "
            f"valid at the top: {', '.join(SHARED)} and the tables {', '.join(f'[{name}]' for name in SECTIONS)}"
        )
    section = content.get(cls.role, {})
    if not isinstance(section, dict):
        raise ConfigurationError(f"{cls.role} in {path} must be a table")
    unknown = sorted(set(section) - set(cls.model_fields))
    if unknown:
        raise ConfigurationError(
            f"unknown setting {', '.join(unknown)} in [{cls.role}] of {path}{_instead(unknown, cls.model_fields)}; "
            f"valid: {', '.join(sorted(cls.model_fields))}"
        )
    return {**top, **section}


def _instead(unknown: Iterable[str], valid: Iterable[str]) -> str:
    """What to append to a refusal: valid names that the unknown ones look like; may be empty."""
    names = list(valid)
    near = dict.fromkeys(name for wrong in unknown for name in difflib.get_close_matches(wrong, names, 1, 0.8))
    return f" (did you mean {', '.join(near)}?)" if near else ""


__all__ = ["BaseRoleSettings", "Bytes", "Seconds", "is_loopback", "load"]
