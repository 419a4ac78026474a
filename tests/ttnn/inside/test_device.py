"""`TenstorrentNpu` on the simulator: what it says agrees with ttnn, what it writes ttnn reads, and the reverse."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ttnn

from decode_worker.npu.base import NpuDevice, NpuMemoryError, OutOfDeviceMemory
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.npu.tenstorrent.device import TenstorrentNpu
from decode_worker.npu.tenstorrent.memory import DTYPES
from decode_worker.npu.tenstorrent.mesh import TenstorrentMesh
from decode_worker.npu.tenstorrent.simulator import simulator_environment
from decode_worker.pool import KVPool
from decode_worker.relayout import Relayout, Target
from transport.errors import ConfigurationError
from transport.geometry import KVGeometry
from transport.geometry.kv import TILE_BYTES
from transport.geometry.plan import plan
from transport.geometry.staging import execute
from transport.messages import Endpoint, ModelInfo

SHAPES = [((4, 8, 32, 128), "bfp8_b"), ((5, 3, 32, 64), "bfloat16"), ((3, 1, 64, 32), "float32")]
MODEL = ModelInfo(name="m", fingerprint="f", max_model_len=512, vocab_size=10)


@pytest.fixture(scope="session")
def npu() -> Iterator[TenstorrentNpu]:
    os.environ.update(simulator_environment(Path(sysconfig.get_paths()["purelib"])))
    device = TenstorrentMesh().chips[0]
    yield device
    device.close()


def host_tensor(shape: Sequence[int], dtype: str) -> Any:
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return ttnn.Tensor(values, getattr(ttnn, DTYPES[dtype]), layout=ttnn.TILE_LAYOUT)


def pages(host: Any, page_bytes: int) -> np.ndarray:
    """uint8 [pages, page_bytes] of a host tensor, as ttnn has tiled it."""
    raw = np.from_dlpack(host.host_buffer().get_shard(ttnn.MeshCoordinate(0, 0)))
    return raw.reshape(-1).view(np.uint8).reshape(-1, page_bytes)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_five_calls_agree_with_ttnn(npu: TenstorrentNpu, shape: tuple[int, int, int, int], dtype: str) -> None:
    before = npu.memory_view()
    buffer = npu.allocate_tensor(shape, dtype)
    tensor = npu.tensor(buffer)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, getattr(ttnn, DTYPES[dtype]))
    assert buffer.num_pages == tensor.buffer_num_pages()
    assert buffer.page_bytes == tensor.buffer_aligned_page_size() == TILE_BYTES[dtype]
    banks = npu.get_device_num_bank()
    assert banks == tensor.device().dram_grid_size().x == 8
    geometry = KVGeometry(1, shape[1], shape[3], shape[2], shape[0], banks, dtype)
    for bank in range(banks):
        assert npu.get_buffer_address_bank(buffer, bank) == tensor.buffer_address()
        size = npu.get_buffer_size_bank(buffer, bank)
        assert size == -(-buffer.num_pages // banks) * buffer.page_bytes == geometry.bank_bytes
        assert npu.memory_view()[bank].used - before[bank].used == size
    with pytest.raises(ConfigurationError, match="--kv-path relay"):
        npu.map_buffer_dma(buffer)
    with pytest.raises(ValueError, match="not mapped"):
        npu.unmap_buffer_dma(buffer)
    npu.free(buffer)
    assert npu.memory_view() == before


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_what_is_written_bank_by_bank_ttnn_reads_as_the_tensor(
    npu: TenstorrentNpu, shape: tuple[int, int, int, int], dtype: str
) -> None:
    buffer, host = npu.allocate_tensor(shape, dtype), host_tensor(shape, dtype)
    tiles = pages(host, buffer.page_bytes)
    for bank in range(8):
        npu.write(bank, buffer.address, tiles[bank::8])
    npu.barrier()
    assert np.array_equal(pages(npu.tensor(buffer).cpu(), buffer.page_bytes), tiles)
    npu.free(buffer)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_what_ttnn_writes_is_read_bank_by_bank(
    npu: TenstorrentNpu, shape: tuple[int, int, int, int], dtype: str
) -> None:
    buffer, host = npu.allocate_tensor(shape, dtype), host_tensor(shape, dtype)
    ttnn.copy_host_to_device_tensor(host, npu.tensor(buffer))
    tiles = pages(host, buffer.page_bytes)
    for bank in range(8):
        mine = tiles[bank::8].reshape(-1)
        assert np.array_equal(npu.read(bank, buffer.address, mine.size), mine)
    npu.free(buffer)


def test_bytes_are_written_where_they_are_said_to_be(npu: TenstorrentNpu) -> None:
    """Odd addresses and lengths, more than one call's worth, any dtype of array."""
    buffer = npu.allocate_tensor((300, 8, 32, 128), "bfloat16")
    data = np.random.default_rng(3).integers(0, 256, (1 << 20) + 5, dtype=np.uint8)
    npu.write(3, buffer.address + 7, data)
    assert np.array_equal(npu.read(3, buffer.address + 7, data.size), data)
    npu.write(3, buffer.address + 64, np.arange(4, dtype=np.float32)[::-1])
    assert npu.read(3, buffer.address + 64, 16).view(np.float32).tolist() == [3, 2, 1, 0]
    assert np.array_equal(npu.read(3, buffer.address + 80, 32), data[73:105])
    npu.free(buffer)


def test_memory_that_is_freed_is_used_again(npu: TenstorrentNpu) -> None:
    first = npu.allocate_tensor((8, 8, 32, 128), "bfloat16")
    kept = npu.allocate_tensor((8, 8, 32, 128), "bfloat16")
    npu.free(first)
    with pytest.raises(ValueError, match="not allocated"):
        npu.free(first)
    again = npu.allocate_tensor((4, 8, 32, 128), "bfloat16")
    assert again.address == first.address
    assert again.id != first.id
    assert kept.address - first.address == npu.get_buffer_size_bank(kept, 0)
    npu.free(again)
    npu.free(kept)


def test_a_contiguous_buffer_lies_in_one_bank(npu: TenstorrentNpu) -> None:
    """The bank is ours to choose, the range of the others is lost: ttnn keeps one book for all of them."""
    before = npu.memory_view()[0].used
    first, second = npu.allocate_contiguous(4096), npu.allocate_contiguous(1000)
    assert (first.bank, second.bank) == (0, 1)
    words = np.arange(250, dtype=np.uint32)
    host = ttnn.Tensor(words.reshape(1, 1, 1, -1), ttnn.uint32, layout=ttnn.ROW_MAJOR_LAYOUT)
    ttnn.copy_host_to_device_tensor(host, npu.tensor(second))
    assert np.array_equal(npu.read(1, second.address, 1000).view(np.uint32), words)
    assert [npu.get_buffer_size_bank(second, bank) for bank in range(3)] == [0, 1024, 0]
    assert npu.memory_view()[5].used - before == 4096 + 1024
    npu.free(first)
    npu.free(second)


@pytest.fixture(params=["tenstorrent", "emulated"])
def device(request: pytest.FixtureRequest) -> Iterator[NpuDevice]:
    """ttnn's allocator for a p150a, and ours that stands for it."""
    if request.param == "tenstorrent":
        yield request.getfixturevalue("npu")
    else:
        emulated = EmulatedNpu()
        yield emulated
        emulated.close()


def test_uneven_filling(device: NpuDevice) -> None:
    """One contiguous receive buffer fills one bank, and interleaved tensors, which need the same range of each, have
    no room any more. The same bytes dealt over the channels leave plenty."""
    assert all(bank.used <= 64 for bank in device.memory_view())  # the barrier's word
    bank, banks = device.memory_view()[0].total, device.get_device_num_bank()
    block = 8 * 128 * 32 * 2
    pool = (bank // 2 * banks // block, 8, 32, 128)  # half of every bank
    receive = (bank * 3 // 4 // block, 8, 32, 128)  # as many bytes as three quarters of one bank
    total = (pool[0] + receive[0]) * block
    assert total < banks * bank * 0.6

    contiguous = device.allocate_contiguous(receive[0] * block)
    with pytest.raises(OutOfDeviceMemory):
        device.allocate_tensor(pool, "bfloat16")
    device.free(contiguous)

    per_channel = device.allocate_tensor(receive, "bfloat16")
    tensor = device.allocate_tensor(pool, "bfloat16")
    used = device.memory_view()
    assert len({usage.used for usage in used}) == 1
    assert 0 <= sum(usage.used for usage in used) - total < 2 * banks * 2048
    device.free(tensor)
    device.free(per_channel)


def test_too_large_a_contiguous_buffer_is_out_of_memory_in_words(npu: TenstorrentNpu) -> None:
    with pytest.raises(OutOfDeviceMemory, match="Not enough space to allocate 5000000000 B DRAM buffer"):
        npu.allocate_contiguous(5_000_000_000)


def test_a_pool_by_way_of_the_relay_is_a_tensor_to_ttnn(npu: TenstorrentNpu) -> None:
    """Written by the plan that any prefill worker would carry out, then copied; its neighbours are untouched."""
    geometry = KVGeometry(1, 3, 64, 32, 6, 8, "bfloat16")
    pool = KVPool(npu, geometry, kv_path="relay")
    assert pool.mirror is not None
    described = pool.description("d0", "g", Endpoint(backend="shm", address="/x"), MODEL)
    tensors = [npu.tensor(buffer) for buffer in pool._buffers]
    before = [host_tensor((6, 3, 32, 64), "bfloat16"), host_tensor((6, 3, 32, 64), "bfloat16")]
    for tensor, host in zip(tensors, before, strict=True):
        ttnn.copy_host_to_device_tensor(host, tensor)
    blocks, prompt = [4, 1], 40
    runs = plan(geometry, described.bases, blocks, 0, prompt)
    staging = np.random.default_rng(7).integers(0, 256, sum(run.length for run in runs), dtype=np.uint8)
    execute(pool.mirror.channels, staging, runs)
    expected = [pages(host, 2048).copy() for host in before]
    banks = [np.zeros((2, -(-36 // 8) * 2048), np.uint8) for _ in range(8)]
    for bank in range(8):
        for tensor, values in enumerate(expected):
            share = values[bank::8].reshape(-1)
            banks[bank][tensor, : share.size] = share
    for run in runs:
        tensor = int(run.remote_offset >= described.bases[1])
        at = run.remote_offset - described.bases[tensor]
        banks[run.region][tensor, at : at + run.length] = staging[run.local_offset : run.local_offset + run.length]
    Relayout(pool).relay(Target("l", "p0", blocks, prompt, 0, None), lambda: True)
    npu.barrier()
    for number, tensor in enumerate(tensors):
        found = pages(tensor.cpu(), 2048)
        for bank in range(8):
            share = found[bank::8].reshape(-1)
            assert np.array_equal(share, banks[bank][number, : share.size])
    pool.close()
    assert npu.memory_view()[0].used == 64  # the barrier's word


def test_a_pool_that_writers_cannot_reach_says_what_to_do(npu: TenstorrentNpu) -> None:
    geometry = KVGeometry(1, 3, 64, 32, 6, 8, "bfloat16")
    with pytest.raises(ConfigurationError, match=r"simulator 0 has no memory that a NIC can write to.*relay"):
        KVPool(npu, geometry, kv_path="hawk")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda n: n.read(8, n._memory.base, 4), "bank must be in"),
        (lambda n: n.read(0, n._memory.base - 1, 4), "outside"),
        (lambda n: n.write(0, 4_278_190_080 - 3, np.zeros(4, np.uint8)), "outside"),
        (lambda n: n.allocate_tensor((1, 1, 16, 32), "bfloat16"), "multiples of 32"),
        (lambda n: n.allocate_contiguous(0), "positive"),
    ],
)
def test_bad_arguments_are_refused(npu: TenstorrentNpu, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(npu)


def test_closing_frees_everything_and_ends_access(npu: TenstorrentNpu) -> None:
    """The last test here: the process has no device after it."""
    buffer = npu.allocate_tensor((4, 8, 32, 128), "bfloat16")
    tensor = npu.tensor(buffer)
    npu.close()
    npu.close()
    assert not tensor.is_allocated()
    with pytest.raises(NpuMemoryError, match="the device is closed"):
        npu.read(0, buffer.address, 4)
