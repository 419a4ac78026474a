"""`/workers`: list, add and remove workers while the router runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from router.registry import Registry
from router.urls import worker_url
from router.workers import PrefillWorker, Worker
from transport.errors import HawkError, InvalidRequest


class WorkerNotFound(HawkError):
    """No such worker is registered."""

    status = 404
    code = "worker_not_found"
    type = "invalid_request_error"


class WorkerSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["prefill", "decode"]
    url: Annotated[str, AfterValidator(worker_url)]


class Admin:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def list(self) -> list[dict[str, Any]]:
        return [self._describe(worker) for worker in self._registry.workers]

    def add(self, body: object) -> tuple[int, dict[str, Any]]:
        """(201, or 200 for one that was known already; the worker). Raises InvalidRequest."""
        try:
            spec = WorkerSpec.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            message = first["msg"].removeprefix("Value error, ")
            raise InvalidRequest(f"{where}: {message}" if where else message, param=where or None) from None
        worker, new = self._registry.add(spec.role, spec.url)
        return (201 if new else 200), self._describe(worker)

    def remove(self, url: str) -> dict[str, Any]:
        """Drains first: what runs there may finish. Raises WorkerNotFound."""
        worker = self._registry.remove(url)
        if worker is None:
            raise WorkerNotFound(f"no worker at {url[:200]!r}", param="url")
        return self._describe(worker)

    def _describe(self, worker: Worker) -> dict[str, Any]:
        described = worker.describe()
        if isinstance(worker, PrefillWorker):
            described["pools"] = self._registry.pools.states(worker)
        return described
