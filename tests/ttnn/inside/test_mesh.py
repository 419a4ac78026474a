"""`TenstorrentMesh` of four mock p150s: one address on every chip, the heads dealt over them, errors by name."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ttnn

from decode_worker.npu.base import NpuMemoryError, OutOfDeviceMemory
from decode_worker.npu.tenstorrent.mesh import TenstorrentMesh
from deploy.tenstorrent.environment import mock_environment
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry


@pytest.fixture(scope="session")
def environment() -> None:
    os.environ.update(mock_environment(Path(sysconfig.get_paths()["purelib"]), 4))


@pytest.fixture(scope="session")
def mesh(environment: None) -> Iterator[TenstorrentMesh]:
    opened = TenstorrentMesh(4)
    yield opened
    opened.close()


def test_each_chip_is_an_npu_of_eight_banks(mesh: TenstorrentMesh) -> None:
    assert [chip.name for chip in mesh.chips] == [f"tenstorrent mock {n}" for n in range(4)]
    assert [chip.get_device_num_bank() for chip in mesh.chips] == [8] * 4
    assert {chip.memory_view()[0].total for chip in mesh.chips} == {4_277_141_376}


@pytest.mark.parametrize("dtype", ["bfp8_b", "bfloat16", "float32"])
def test_heads_are_dealt_over_the_chips_at_one_address(mesh: TenstorrentMesh, dtype: str) -> None:
    k, v = (mesh.allocate_tensor((16, 8, 32, 128), dtype) for _ in "KV")
    geometry = KVGeometry(1, 2, 128, 32, 16, 8, dtype)  # a chip's part: two of eight heads
    assert (k.num_pages, k.page_bytes) == (geometry.num_pages, geometry.page_bytes)
    for chip in mesh.chips:
        assert tuple(chip.tensor(k).shape) == (16, 2, 32, 128)
        assert chip.tensor(k).buffer_address() == chip.get_buffer_address_bank(k, 5) == k.address
        assert chip.get_buffer_size_bank(k, 5) == geometry.bank_bytes
        assert chip.get_buffer_address_bank(v, 0) == k.address + geometry.bank_bytes
        assert chip.memory_view()[3].used == 2 * geometry.bank_bytes
    for buffer in (k, v):
        mesh.memory.free(buffer)


def test_ttnn_shards_a_tensor_just_so(mesh: TenstorrentMesh) -> None:
    """What ttnn makes of all heads, sharded over dim 1, takes the place of one of ours."""
    ours = mesh.allocate_tensor((16, 8, 32, 128), "bfp8_b")
    mesh.memory.free(ours)
    host = ttnn.Tensor(np.zeros((16, 8, 32, 128), np.float32), ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT)
    theirs = ttnn.distribute_tensor(host, ttnn.shard_tensor_to_mesh_mapper(mesh.device, 1), mesh.device)
    assert (theirs.buffer_address(), theirs.buffer_num_pages()) == (ours.address, ours.num_pages)
    theirs.deallocate()


def test_heads_that_do_not_divide_are_refused(mesh: TenstorrentMesh) -> None:
    with pytest.raises(ValueError, match="6 heads cannot be dealt over 4 chips"):
        mesh.allocate_tensor((16, 6, 32, 128), "bfp8_b")


def test_memory_runs_out_on_all_chips_at_once(mesh: TenstorrentMesh) -> None:
    blocks = mesh.memory.usage()[0].total // 2048  # each chip would have twice that many pages per bank
    with pytest.raises(OutOfDeviceMemory, match="Out of Memory"):
        mesh.allocate_tensor((blocks, 4 * 16, 32, 32), "bfloat16")
    assert mesh.memory.usage()[0].used == 0


def test_a_mock_chip_says_that_it_has_no_memory(mesh: TenstorrentMesh) -> None:
    buffer = mesh.allocate_tensor((16, 8, 32, 128), "bfp8_b")
    with pytest.raises(NpuMemoryError, match="mock device has no memory"):
        mesh.chips[2].read(0, buffer.address, 4)
    with pytest.raises(NpuMemoryError, match="mock device has no memory"):
        mesh.chips[2].write(0, buffer.address, np.zeros(4, np.uint8))
    with pytest.raises(ConfigurationError, match="--kv-path relay"):
        mesh.chips[2].map_buffer_dma(buffer)
    mesh.memory.free(buffer)


def test_a_chip_that_is_not_there_is_refused_by_name(mesh: TenstorrentMesh) -> None:
    mesh.close()
    mesh.close()
    with pytest.raises(ConfigurationError, match=r"ttnn cannot open Tenstorrent chip 9: .+"):
        TenstorrentMesh(1, device_id=9)
    with pytest.raises(ConfigurationError, match=r"ttnn cannot open 5 Tenstorrent chips, from 0 on: .+"):
        TenstorrentMesh(5)
    with pytest.raises(ValueError, match="chips must be positive"):
        TenstorrentMesh(0)
