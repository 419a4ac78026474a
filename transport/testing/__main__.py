"""A fake worker as a process, for router benchmarks: `python -m transport.testing ROLE PORT MODEL_DIR [STEP_MS]`.

HAWK_TOKEN is the cluster token.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from transport.model import model_info
from transport.serve import run
from transport.testing.decode import FakeDecode
from transport.testing.hosting import hosted
from transport.testing.prefill import FakePrefill
from transport.testing.worker import FakeWorker


async def _main(role: str, port: int, model_dir: Path, step_ms: float) -> None:
    model = model_info(model_dir, model_dir.name)
    worker: FakeWorker
    if role == "decode":
        worker = FakeDecode(f"fake-{role}-{port}", model, num_blocks=65536)
        worker.step_s = step_ms / 1000
    else:
        worker = FakePrefill(f"fake-{role}-{port}", model)
    worker.successor = lambda token: (token * 31 + 7) % model.vocab_size
    async with hosted(worker, os.environ["HAWK_TOKEN"], port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(_main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 20.0))
