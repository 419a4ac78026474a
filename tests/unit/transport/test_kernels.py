"""The transform: reading back gives the KV; the fast kernel equals the numpy definition byte for byte."""

from __future__ import annotations

import itertools
import threading
from types import ModuleType

import numpy as np
import pytest
from geometry_cases import LAYOUTS, POISON, Case, build, cases, splits
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.geometry import KVGeometry
from transport.geometry.pages import PageLayout
from transport.geometry.rope import permutation
from transport.geometry.staging import linear_bytes
from transport.geometry.tiles import decode, encode
from transport.kernels import cpu, reference
from transport.kernels.source import Source

KERNELS = [pytest.param(reference, id="reference"), pytest.param(cpu, id="cpu")]
BITS = {"bfp8_b": 7, "bfp4_b": 3}


def write(kernel: ModuleType, case: Case, ranges: list[tuple[int, int]]) -> list[np.ndarray]:
    channels = case.poisoned()
    for start, stop in ranges:
        kernel.transform_into(channels, case.bases, *case.arguments(start, stop))
    return channels


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def through_tiles(values: np.ndarray, dtype: str, rope: str) -> np.ndarray:
    """float32 [L, T, H, D] as the pool's dtype holds it: its own encoder on the tiles of the padded tokens."""
    layers, tokens, heads, dims = values.shape
    order = permutation(dims, rope)
    padded = np.pad(values, ((0, 0), (0, -tokens % 32), (0, 0), (0, 0)))[..., order]
    tiles = padded.reshape(layers, -1, 32, heads, dims // 32, 32).transpose(0, 1, 3, 4, 2, 5)
    back = decode(encode(tiles, "float32", dtype), dtype).transpose(0, 1, 4, 2, 3, 5)
    return back.reshape(layers, -1, heads, dims)[:, :tokens][..., np.argsort(order)]


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_reading_back_gives_the_kv(kernel: ModuleType, case: Case) -> None:
    channels = write(kernel, case, [(0, case.tokens)])
    got = reference.read_kv(channels, case.bases, case.geometry, case.dst_blocks, case.tokens)
    for side, (values, expected) in enumerate(zip(got, case.expected(), strict=True)):
        if case.geometry.dtype in ("float32", case.source.layout.dtype):
            assert np.array_equal(values, expected)
        else:
            rope = case.geometry.rope if side == 0 else "half"
            assert np.array_equal(values, through_tiles(expected, case.geometry.dtype, rope))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=40)
@given(case=cases(layouts=("npu",)))
def test_block_floats_stay_within_a_step_of_their_row(kernel: ModuleType, case: Case) -> None:
    if case.geometry.dtype not in BITS:
        return
    channels = write(kernel, case, [(0, case.tokens)])
    got = reference.read_kv(channels, case.bases, case.geometry, case.dst_blocks, case.tokens)
    for values, expected in zip(got, case.expected(), strict=True):
        # a face row is 16 dims of one token; RoPE order draws them from the whole head: bound by the head's largest
        largest = np.abs(expected).max(axis=-1, keepdims=True)
        step = np.exp2(np.floor(np.log2(np.maximum(largest, 2.0**-126))) - (BITS[case.geometry.dtype] - 1))
        assert (np.abs(values - expected) <= step).all()


@settings(deadline=None, max_examples=100)
@given(cases(), st.data())
def test_the_cpu_kernel_equals_the_reference(case: Case, data: st.DataObject) -> None:
    ranges = data.draw(splits(case.tokens))
    assert same(write(cpu, case, ranges), write(reference, case, ranges))
    for start, stop in ranges:
        arguments = case.arguments(start, stop)
        tensors = data.draw(st.lists(st.sampled_from(range(case.geometry.num_tensors)), min_size=1, unique=True))
        assert np.array_equal(cpu.transform(*arguments, tensors), reference.transform(*arguments, tensors))
        linear = (case.source, case.geometry, case.src_blocks, start, stop, tensors)
        assert np.array_equal(cpu.to_linear(*linear), reference.to_linear(*linear))


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=40)
@given(case=cases(), data=st.data())
def test_any_split_into_chunks_gives_the_bytes_of_one_push(kernel: ModuleType, case: Case, data: st.DataObject) -> None:
    whole = write(kernel, case, [(0, case.tokens)])
    ranges = data.draw(st.permutations(data.draw(splits(case.tokens))))
    assert same(write(kernel, case, list(ranges)), whole)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_rows_past_the_prompt_in_the_last_tile_are_zero(kernel: ModuleType, case: Case) -> None:
    channels = write(kernel, case, [(0, case.tokens)])
    padded = -(-case.tokens // 32) * 32
    k, v = reference.read_kv(channels, case.bases, case.geometry, case.dst_blocks, padded)
    assert not k[:, case.tokens :].any()
    assert not v[:, case.tokens :].any()


@pytest.mark.parametrize("kernel", KERNELS)
@settings(deadline=None, max_examples=60)
@given(case=cases(), data=st.data())
def test_relayout_of_a_linear_piece_equals_the_direct_path(kernel: ModuleType, case: Case, data: st.DataObject) -> None:
    pool, dtype = case.geometry, case.source.layout.dtype
    start, stop = data.draw(st.sampled_from(data.draw(splits(case.tokens))))
    tensors = data.draw(st.lists(st.sampled_from(range(pool.num_tensors)), min_size=1, unique=True))
    linear = kernel.to_linear(case.source, pool, case.src_blocks, start, stop, tensors)
    assert linear.size == linear_bytes(pool, dtype, start, stop, len(tensors))
    slot = np.concatenate([linear, np.full(64, POISON, np.uint8)])  # a slot may be longer than the piece in it
    piece = (slot, dtype, start, stop, tensors)
    channels, expected = case.poisoned(), case.poisoned()
    written = kernel.from_linear(channels, case.bases, pool, case.dst_blocks, *piece)
    assert written == reference.transform_into(expected, case.bases, *case.arguments(start, stop), tensors)
    assert same(channels, expected)
    tiled = kernel.tile_linear(pool, case.dst_blocks, *piece)
    assert np.array_equal(tiled, reference.transform(*case.arguments(start, stop), tensors))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_linear_piece_that_is_too_short_is_refused(kernel: ModuleType) -> None:
    case = small_case()
    linear = kernel.to_linear(case.source, case.geometry, case.src_blocks, 32, 100, [1, 2])
    with pytest.raises(ValueError, match="has 49151 bytes, 2 tensors of 96 rows need 49152"):
        kernel.tile_linear(case.geometry, case.dst_blocks, linear[:-1], "bfloat16", 32, 100, [1, 2])
    channels = case.poisoned()
    with pytest.raises(ValueError, match="3 tensors"):
        kernel.from_linear(channels, case.bases, case.geometry, case.dst_blocks, linear, "bfloat16", 32, 100, [1, 2, 3])
    assert same(channels, case.poisoned())


@pytest.mark.parametrize("kernel", KERNELS)
def test_case_30_every_block_size_meets_every_page_layout(kernel: ModuleType) -> None:
    """vllm #26759: mixed block sizes with an assumed order. The table decides, whatever the sizes and the order."""
    sizes = [32, 64, 128]
    for (order, packing, dtype), source_size, pool_size in itertools.product(LAYOUTS, sizes, sizes):
        pool = KVGeometry(1, 3, 64, pool_size, 260 // pool_size + 2, 7, "float32")
        case = build(pool, PageLayout(3, 64, source_size, order, packing, dtype), 260, seed=source_size)
        channels = write(kernel, case, [(0, 260)])
        got = reference.read_kv(channels, case.bases, pool, case.dst_blocks, 260)
        assert np.array_equal(got[0], case.expected()[0]), (order, packing, dtype, source_size, pool_size)
        assert np.array_equal(got[1], case.expected()[1]), (order, packing, dtype, source_size, pool_size)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfp8_b", "bfp4_b"])
def test_special_values_come_out_as_the_encoder_says(kernel: ModuleType, dtype: str) -> None:
    """Infinities, NaNs, subnormals and signed zeros, in every source dtype."""
    for source_dtype, bits in (("float32", 32), ("bfloat16", 16), ("float16", 16)):
        pool = KVGeometry(1, 1, 128, 32, 1, 1, dtype)
        layout = PageLayout(1, 128, 32, dtype=source_dtype)
        case = build(pool, layout, 32)
        words = np.random.default_rng(7).integers(0, 2**bits, case.source.layers[0].size, dtype=np.uint64)
        words[:64] = [0, 1 << (bits - 1), 1, (1 << bits) - 1] * 16
        pages = words.astype(f"u{bits // 8}").view(case.source.layers[0].dtype).reshape(layout.shape(-1))
        case.source = Source([pages], layout)
        case.src_blocks = [0]
        with np.errstate(invalid="ignore", over="ignore"):
            got, want = write(kernel, case, [(0, 32)]), write(reference, case, [(0, 32)])
        assert same(got, want)
        tile = encode(np.ascontiguousarray(pages[0, 0, :, :32]), source_dtype, dtype)
        assert np.array_equal(got[0][: pool.page_bytes], tile)


@pytest.mark.parametrize("kernel", KERNELS)
def test_misaligned_channel_memory_is_written_just_as_well(kernel: ModuleType) -> None:
    for dtype in ("float32", "bfloat16", "bfp8_b", "bfp4_b"):
        pool = KVGeometry(1, 2, 64, 32, 4, 3, dtype)
        case = build(pool, PageLayout(2, 64, 32, dtype="bfloat16"), 100, gap=3)
        whole = case.poisoned()
        shifted = [np.full(case.region_bytes + 1, POISON, np.uint8)[1:] for _ in whole]
        kernel.transform_into(whole, case.bases, *case.arguments(0, 100))
        kernel.transform_into(shifted, case.bases, *case.arguments(0, 100))
        assert same(whole, shifted)


def small_case() -> Case:
    return build(KVGeometry(2, 2, 64, 32, 4, 3), PageLayout(2, 64, 64, dtype="bfloat16"), 100)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bytes_written_are_counted(kernel: ModuleType) -> None:
    case = small_case()
    channels = case.poisoned()
    assert kernel.transform_into(channels, case.bases, *case.arguments(0, 100)) == 4 * 4 * 2 * 2 * 2048
    assert kernel.transform_into(channels, case.bases, *case.arguments(64, 100), [1]) == 2 * 2 * 2 * 2048


@pytest.mark.parametrize("kernel", KERNELS)
def test_sources_that_do_not_cover_the_range_are_refused(kernel: ModuleType) -> None:
    case = small_case()
    channels = case.poisoned()
    pool, dst, source, src = case.geometry, case.dst_blocks, case.source, case.src_blocks
    with pytest.raises(ValueError, match="source block ids"):
        kernel.transform_into(channels, case.bases, pool, dst, source, [0, 99], 0, 100)
    with pytest.raises(ValueError, match="past the 64 tokens"):
        kernel.transform_into(channels, case.bases, pool, dst, source, src[:1], 0, 100)
    with pytest.raises(ValueError, match="outside the pool"):
        kernel.transform_into(channels, case.bases, pool, [0, 1, 2, 4], source, src, 0, 100)
    other = KVGeometry(2, 4, 64, 32, 4, 3)
    with pytest.raises(ValueError, match="the pool"):
        kernel.transform(other, dst, source, src, 0, 100)
    assert same(channels, case.poisoned())


def test_the_cpu_kernel_refuses_memory_it_would_leave() -> None:
    case = small_case()
    short = [memory[: case.bases[-1] + case.geometry.bank_bytes - 1] for memory in case.poisoned()]
    with pytest.raises(ValueError, match="bytes, the tensors"):
        cpu.transform_into(short, case.bases, *case.arguments(0, 100))
    with pytest.raises(ValueError, match="channels"):
        cpu.transform_into(case.poisoned()[:2], case.bases, *case.arguments(0, 100))
    frozen = case.poisoned()
    frozen[0].flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        cpu.transform_into(frozen, case.bases, *case.arguments(0, 100))


def test_source_pages_must_fit_their_layout() -> None:
    layout = PageLayout(2, 64, 32, dtype="bfloat16")
    with pytest.raises(ValueError, match="expected C-contiguous bfloat16"):
        Source([np.zeros(layout.shape(2), np.float32)], layout)
    with pytest.raises(ValueError, match="expected C-contiguous"):
        Source([np.zeros(layout.shape(4), np.uint16)[::2]], layout)
    with pytest.raises(ValueError, match="whole number of blocks"):
        Source([np.zeros(100, np.uint16)], layout)


def test_other_threads_run_while_the_cpu_kernel_does() -> None:
    """The GIL is free: a thread counts on while one long transform runs in another."""
    pool = KVGeometry(1, 8, 128, 128, 64, 8, "bfp4_b")
    layout = PageLayout(8, 128, 128, dtype="float32")
    source = Source([np.ones(64 * layout.block_elements, np.float32)], layout)
    channels = [np.zeros(2 * pool.bank_bytes, np.uint8) for _ in range(8)]
    arguments = (channels, [0, pool.bank_bytes], pool, range(64), source, range(64), 0, 8192, [0])
    cpu.prepare(pool, layout)
    running = threading.Event()

    def work() -> None:
        running.set()
        for _ in range(20):
            cpu.transform_into(*arguments)
        running.clear()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    counted = 0
    while running.is_set():
        counted += 1
    thread.join()
    assert counted > 10_000
