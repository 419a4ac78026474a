"""The live line while a cluster starts: which role is doing what, since when."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from shutil import get_terminal_size
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class StatusLine:
    """One line, rewritten in place on a terminal; elsewhere a line per change."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._began = time.monotonic()
        self._shown: dict[str, str] = {}
        self._frame = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def show(self, doing: Mapping[str, str]) -> None:
        """`doing`: role process → what it does now ("ready", or a few words)."""
        if self._live:
            self._frame += 1
            text = f"{SPINNER[self._frame % len(SPINNER)]} {self.elapsed_s:3.0f} s  " + " · ".join(
                f"{name} {what}" for name, what in doing.items()
            )
            width = get_terminal_size().columns - 1
            self._out.write("\r\x1b[K" + (text if len(text) <= width else text[: width - 1] + "…"))
            self._out.flush()
            return
        for name, what in doing.items():
            if self._shown.get(name) != what:
                self._shown[name] = what
                print(f"{self.elapsed_s:5.1f} s  {name}: {what}", file=self._out, flush=True)

    def clear(self) -> None:
        if self._live:
            self._out.write("\r\x1b[K")
            self._out.flush()
