"""Settings of the router role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, SecretStr, field_validator, model_validator

from router.urls import worker_url
from transport.messages import Name
from transport.settings import BaseRoleSettings, Seconds

Count = Annotated[int, Field(gt=0)]


class RouterSettings(BaseRoleSettings):
    """The router: OpenAI HTTP in front, sessions to prefill and decode workers behind."""

    role: ClassVar[str] = "router"

    port: int = Field(8000, ge=0, le=65535, description="port to listen on")

    model: Path = Field(..., description="Hugging Face model directory (tokenizer and chat template)")
    served_name: Name | None = Field(None, description="the model's name for clients (default: the directory's name)")
    prefill: list[str] = Field(default_factory=list, description="URL of a prefill worker; repeatable")
    decode: list[str] = Field(default_factory=list, description="URL of a decode worker; repeatable")
    api_keys: list[SecretStr] = Field(default_factory=list, description="keys that clients must send (default: none)")

    max_concurrent: Count = Field(1024, description="requests served at the same time; more wait")
    max_queued: Annotated[int, Field(ge=0)] = Field(1024, description="requests that may wait; over it: 503")
    max_choices: Count = Field(128, description="choices of one request: prompts times n")
    prefills_per_worker: Count = Field(8, description="prefills in flight on one prefill worker; more wait here")
    max_retries: Annotated[int, Field(ge=0)] = Field(
        2, description="further tries of a request that failed on a worker"
    )
    max_preemptions: Annotated[int, Field(ge=0)] = Field(3, description="preemptions of a request before it fails")

    queue_timeout_s: Seconds = Field(60.0, description="seconds a request may wait for room; then 503")
    request_timeout_s: Seconds = Field(1800.0, description="seconds a request may take in all")
    reserve_timeout_s: Seconds = Field(10.0, description="seconds a decode worker may take to answer Reserve")
    prefill_timeout_s: Seconds = Field(300.0, description="seconds a prefill may take")
    token_timeout_s: Seconds = Field(60.0, description="seconds without a token before a stream counts as stuck")
    reconnect_max_s: Seconds = Field(2.0, description="longest pause between tries to reach a worker")

    @field_validator("prefill", "decode")
    @classmethod
    def _worker_urls(cls, urls: list[str]) -> list[str]:
        return [worker_url(url) for url in urls]

    @model_validator(mode="after")
    def _distinct(self) -> RouterSettings:
        both = [*self.prefill, *self.decode]
        if twice := {url for url in both if both.count(url) > 1}:
            raise ValueError(f"prefill, decode: listed more than once: {', '.join(sorted(twice))}")
        return self

    @property
    def model_name(self) -> str:
        return self.served_name or self.model.resolve().name
