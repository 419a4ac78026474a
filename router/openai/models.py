"""`/v1/models`: the one model that is served."""

from __future__ import annotations

from typing import Any

from transport.errors import ModelNotFound


class Models:
    def __init__(self, name: str, created: int) -> None:
        self._name = name
        self._created = created

    def list(self, max_model_len: int) -> dict[str, Any]:
        return {"object": "list", "data": [self._card(max_model_len)]}

    def get(self, name: str, max_model_len: int) -> dict[str, Any]:
        """Raises ModelNotFound."""
        if name != self._name:
            raise ModelNotFound(f"the model {name[:128]!r} does not exist here; {self._name!r} does", param="model")
        return self._card(max_model_len)

    def _card(self, max_model_len: int) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "hawk",
            "max_model_len": max_model_len,
        }
