"""A process at one end of a data plane: commands and answers by a pipe, and signals."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


class PeerProcess:
    """A process at one end, with a pipe to it."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = spawn.Pipe()
        self.process: BaseProcess = spawn.Process(target=main, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    async def answer(self) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self.pipe.recv), 60)

    async def ask(self, *command: object) -> Any:
        self.pipe.send(command)
        return await self.answer()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    async def stopped(self) -> None:
        """SIGSTOP, and wait until it has taken effect."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.001)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
