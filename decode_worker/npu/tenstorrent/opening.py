"""The chip that the settings ask for, in an environment that does not contradict them."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from decode_worker.npu.tenstorrent.device import TenstorrentNpu
from decode_worker.npu.tenstorrent.mesh import MOCK, SIMULATOR, TenstorrentMesh
from decode_worker.npu.tenstorrent.simulator import simulator_environment
from transport.errors import ConfigurationError


def open_chip(device_id: int = 0, *, simulator: bool = False) -> TenstorrentNpu:
    """A card, or the simulated p150a. Raises ConfigurationError where there is none, or where the environment, which
    is where ttnn looks, names another device."""
    if os.environ.get(MOCK):
        raise ConfigurationError(f"{MOCK} is set: ttnn would open a device without memory; unset it")
    if simulator:
        environment = simulator_environment(Path(sysconfig.get_paths()["purelib"]))
        if not Path(environment[SIMULATOR]).is_dir():
            raise ConfigurationError(
                f"there is no simulator in {environment[SIMULATOR]}: run the decode worker by the Python of "
                ".venv-ttnn, which `make env-ttnn` makes"
            )
        os.environ.update(environment)
    elif os.environ.get(SIMULATOR):
        raise ConfigurationError(f"{SIMULATOR} is set, but not --simulator: unset the one, or say the other")
    return TenstorrentMesh(device_id=device_id).chips[0]
