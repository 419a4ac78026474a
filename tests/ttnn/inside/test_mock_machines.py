"""Mock machines: ops are validated, planned and "run" on one p150 and on four, with the stand-in compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ttnn


def tensor(mesh: Any, shape: tuple[int, ...]) -> Any:
    host = ttnn.Tensor(np.zeros(shape, np.float32), ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)
    return host.to(mesh, ttnn.DRAM_MEMORY_CONFIG)


def test_a_p150_has_8_banks_and_140_cores(mock_mesh: Any) -> None:
    dram, cores = mock_mesh.dram_grid_size(), mock_mesh.compute_with_storage_grid_size()
    assert (dram.x * dram.y, cores.x * cores.y) == (8, 140)
    assert mock_mesh.get_num_devices() == 4


def test_an_op_runs_in_name(mock_mesh: Any) -> None:
    product = ttnn.linear(tensor(mock_mesh, (1, 1, 32, 64)), tensor(mock_mesh, (1, 1, 64, 96)))
    assert tuple(product.shape) == (1, 1, 32, 96)


def test_an_op_is_refused_that_a_card_would_refuse(mock_mesh: Any) -> None:
    with pytest.raises(RuntimeError, match="width of the first tensor must be equal to the height"):
        ttnn.linear(tensor(mock_mesh, (1, 1, 32, 64)), tensor(mock_mesh, (1, 1, 128, 96)))


def test_the_chips_are_one_mesh(mock_mesh: Any) -> None:
    gathered = ttnn.all_gather(tensor(mock_mesh, (1, 1, 32, 64)), dim=3, num_links=1, topology=ttnn.Topology.Linear)
    assert tuple(gathered.shape) == (1, 1, 32, 256)
