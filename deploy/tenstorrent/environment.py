"""Environment variables under which ttnn opens a simulated p150a or mock p150s, for tests and the doctor.

The simulator keeps what is written into its DRAM. A mock device has no memory at all: allocation, addresses,
validation of ops and programs are ttnn's own, and every op returns at once.
"""

from __future__ import annotations

from pathlib import Path

from decode_worker.npu.tenstorrent.simulator import cardless_environment, simulator_environment, state_directory
from deploy.tenstorrent.cluster import CHIPS

__all__ = ["descriptor_path", "mock_environment", "simulator_environment"]


def descriptor_path(site_packages: Path, chips: int) -> Path:
    """Where `prepare` writes the cluster descriptor of `chips` mock p150s. The file's name is the host's name in it."""
    return state_directory(site_packages) / f"p150x{chips}.yaml"


def mock_environment(site_packages: Path, chips: int = 1) -> dict[str, str]:
    """Environment variables for a machine of `chips` mock p150s: 1, 2 or 4. Raises ValueError for others."""
    if chips not in CHIPS:
        raise ValueError(f"there are mock machines of {CHIPS} chips, got {chips}")
    return cardless_environment(site_packages, "mock") | {
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(descriptor_path(site_packages, chips)),
    }
