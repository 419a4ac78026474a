"""Runs a real prefill worker that also saves what the engine's pages hold: DIR, then the role's flags.

After the last range of a request, DIR/LEASE.npz gets the pages of its block table, `pages` [L, blocks, H, N, 2D]
in storage dtype, and the packing by name: what the push must have moved.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np


def save_pages(directory: Path) -> None:
    """Make the connector save before it pushes; must run before the engine forks."""
    from prefill_worker.connector import hawk, pages

    plain = hawk.HawkConnector.wait_for_save

    def saving(self: hawk.HawkConnector) -> None:
        for item in self._get_connector_metadata().step.ranges:  # type: ignore[attr-defined]
            if item.blocks.last:
                source = pages.source(self._worker._kv_caches, self._worker._layers)
                table = list(item.blocks.blocks)
                np.savez(
                    directory / f"{item.lease.id}.part.npz",
                    pages=np.stack([layer[table] for layer in source.layers]),
                    packing=source.layout.packing,
                )
                os.rename(directory / f"{item.lease.id}.part.npz", directory / f"{item.lease.id}.npz")
        plain(self)

    hawk.HawkConnector.wait_for_save = saving  # type: ignore[method-assign]


def main() -> None:
    directory, flags = Path(sys.argv[1]), sys.argv[2:]
    from prefill_worker import app, engine
    from prefill_worker.settings import PrefillSettings
    from transport.settings import load

    settings = load(PrefillSettings, flags)
    engine._prepare_environment(settings)
    save_pages(directory)
    app.run(settings)


if __name__ == "__main__":
    main()
