"""Settings of `hawk up`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from deploy.model import DEFAULT
from deploy.roles import ModelPath
from transport.settings import SHARED, BaseRoleSettings, Seconds

Workers = Annotated[int, Field(ge=1, le=64)]
Port = Annotated[int, Field(ge=1, le=65535)]

#: settings of `hawk up` that mean the same for each role, and are handed to all of them when set
FORWARDED = tuple(name for name in BaseRoleSettings.model_fields if name not in (*SHARED, "name", "host", "port"))


class UpSettings(BaseRoleSettings):
    """A router, prefill workers and decode workers on this machine, watched over until Ctrl-C.

    Workers listen on loopback, on PORT + 100 + i (prefill) and PORT + 200 + i (decode). A cluster token is made
    for each run. The roles read their own settings (HAWK_ROUTER_…, HAWK_PREFILL_…, HAWK_DECODE_…) as ever.
    """

    role: ClassVar[str] = "up"

    name: str = Field("", max_length=200, description="prefix of the processes' names (default: hawk-PORT)")
    host: str = Field("127.0.0.1", description="address that the router listens on")
    port: Port = Field(8000, description="port of the router")
    prefill: Workers = Field(1, description="number of prefill workers")
    decode: Workers = Field(1, description="number of decode workers")
    prefill_port: Port | None = Field(None, description="port of the first prefill worker (default: PORT + 100)")
    decode_port: Port | None = Field(None, description="port of the first decode worker (default: PORT + 200)")
    model: ModelPath = Field(
        Path(DEFAULT), validate_default=True, description=f"model directory, or a name as {DEFAULT}"
    )
    pin: bool = Field(True, description="give each worker CPUs of its own")
    check_memory: bool = Field(True, description="refuse to start where memory will not suffice")
    ready_timeout_s: Seconds = Field(600.0, description="seconds until the cluster must be ready")
    grace_s: Seconds = Field(10.0, description="seconds that roles get to finish at the end; then they are killed")

    @model_validator(mode="before")
    @classmethod
    def _of_this_run(cls, values: Any) -> Any:
        """A new token, and a name that no other cluster on this host has."""
        if not isinstance(values, dict):
            return values
        own = {"name": values.get("name") or f"hawk-{values.get('port', cls.model_fields['port'].default)}"}
        if not values.get("token") and not values.get("token_file"):
            own["token"] = secrets.token_hex(32)
        return {**values, **own}

    @model_validator(mode="after")
    def _ports_apart(self) -> UpSettings:
        ports = self.ports()
        if len(set(ports)) < len(ports) or max(ports) > 65535:
            raise ValueError(f"port, prefill_port, decode_port: the roles' ports overlap or exceed 65535: {ports}")
        return self

    def ports(self) -> list[int]:
        """Of the router, the prefill workers and the decode workers, in this order."""
        prefill, decode = self.prefill_port or self.port + 100, self.decode_port or self.port + 200
        return [self.port, *(prefill + i for i in range(self.prefill)), *(decode + i for i in range(self.decode))]
