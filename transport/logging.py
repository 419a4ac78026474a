"""Log set-up of every role: one line per record, or JSON; a secret never reaches the log."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence

_REDACTED = "[secret]"


class _Redacting(logging.Formatter):
    """Replaces the secrets in the finished line, wherever they came from: arguments, exceptions, tracebacks."""

    def __init__(self, role: str, secrets: Sequence[str]) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {role} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime
        self._role = role
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        line = self.line(record)
        for secret in self._secrets:
            line = line.replace(secret, _REDACTED)
        return line

    def line(self, record: logging.LogRecord) -> str:
        return super().format(record)


class _Json(_Redacting):
    def line(self, record: logging.LogRecord) -> str:
        fields = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def setup_logging(role: str, level: str = "info", *, as_json: bool = False, secrets: Sequence[str] = ()) -> None:
    """Send all records of `level` and above to stderr; replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Json if as_json else _Redacting)(role, secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("httpx", "httpcore", "websockets", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
