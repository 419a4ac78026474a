"""What ttnn and UMD must find in their environment to open wolfpine's simulated p150a instead of a card."""

from __future__ import annotations

from pathlib import Path


def state_directory(site_packages: Path) -> Path:
    """Where caches and logs of simulated and mock devices lie: in the virtual environment, next to nothing else."""
    return site_packages.parents[2] / "tenstorrent"


def cardless_environment(site_packages: Path, machine: str) -> dict[str, str]:
    """What every device that is no card needs; `machine` tells their compiled files apart.

    A cache of their own, because a kernel compiled for one of them must never reach a card or another machine.
    """
    state = state_directory(site_packages)
    return {
        "TT_METAL_CACHE": str(state / f"cache-{machine}"),
        "TT_METAL_LOGS_PATH": str(state),  # else ttnn makes a directory `generated` wherever it is started
        # Fast dispatch runs on the device's own cores, with kernels that need the real compiler.
        "TT_METAL_SLOW_DISPATCH_MODE": "1",
        "TT_METAL_INSPECTOR_RPC": "0",  # a debugger's port, which two processes would fight for
        "TT_LOGGER_LEVEL": "error",
        "LOGURU_LEVEL": "INFO",  # ttnn prints its whole configuration at DEBUG
    }


def simulator_environment(site_packages: Path) -> dict[str, str]:
    """Environment variables for `ttnn.open_device` in a process whose packages lie in `site_packages`.

    They may be set after ttnn has been imported, but before a device is opened. The device also listens on a
    socket, so that tt-umd of this process or another reads and writes its DRAM past ttnn.
    """
    python = site_packages.parents[2] / "bin" / "python"
    return cardless_environment(site_packages, "simulator") | {
        "TT_METAL_SIMULATOR": str(site_packages / "framework" / "sim" / "blackhole"),
        "TT_METAL_SIMULATOR_SERVE_OVER_SOCKETS": "1",
        "TT_SIMULATOR_LOCALHOST": "1",
        "TT_SIM_DEADLOCK": "0",  # it prints a notice whenever no core does anything
        "WOLFPINE_PYTHON": str(python),
    }
