"""A decode worker on whose memory a byte changes: `python -m tests.e2e.flipping_decode FILE decode`.

FILE holds how many of the next leases are to be hit. Of each, one byte of the last piece changes after it has
landed and before it is looked at, as a fault on the way would leave it: the exponent of a prompt token's K or V.
While there is a FILE.hold, the decode worker does not look yet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from decode_worker.relayout import Relayout, Target
from deploy.cli import main
from transport.backends.base import Piece, Run

HOLD_S = 30.0
"""For longer nobody is to be waited for."""


def flip(file: Path) -> None:
    """Make this process's decode worker hit its leases."""
    check = Relayout._check

    def flipped(relayout: Relayout, target: Target, piece: Piece, runs: Sequence[Run]) -> None:
        last = relayout._pool.geometry.num_tensors - 1
        if (piece.stop, piece.last_tensor) == (target.prompt_tokens, last) and (left := int(file.read_text())):
            file.write_text(str(left - 1))
            run = runs[-1]
            relayout._read(run.region, run.remote_offset, run.length)[3] ^= 0x40
            deadline = time.monotonic() + HOLD_S
            while file.with_suffix(".hold").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        check(relayout, target, piece, runs)

    Relayout._check = flipped  # type: ignore[method-assign]


if __name__ == "__main__":
    flip(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
