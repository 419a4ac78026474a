"""`hawk bench decode`: tokens/s of the decode engine against the same model in vLLM on the same CPU.

Decode only, both engines in this process, their rounds alternate. One engine step of either is one token for
each of `batch` sequences. vLLM is timed twice: its whole step, and the model with sampling alone, without its
scheduler; ours is the engine's step and the argmax.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decode_worker.engines.base import DecodeBatch
from decode_worker.npu.emulated import EmulatedNpu
from decode_worker.pool import KVPool
from transport.geometry import KVGeometry


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hawk bench decode", description=__doc__)
    parser.add_argument("--model", type=Path, help="HF model directory (default: the default model)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16", "bfp8_b", "bfp4_b"), help="default: --dtype")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache before the first step")
    parser.add_argument("--steps", type=int, default=16, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model (a minute or more)")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args(argv)
    for name in ("context", "steps", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min(args.batch) < 1:
        parser.error("--batch must be at least 1")
    return args


def read_bandwidth() -> float:
    """GB/s of one thread reading 256 MiB of memory, best of five: the floor under every step."""
    data = np.ones(1 << 26, np.float32)

    def once() -> float:
        start = time.perf_counter()
        data.max()
        return time.perf_counter() - start

    return data.nbytes / min(once() for _ in range(5)) / 1e9


class Ours:
    """The engine over an emulated NPU. What lies in the cache does not matter for the time: zeros."""

    def __init__(self, args: argparse.Namespace, config: Mapping[str, Any]) -> None:
        block = 32
        self._width = -(-(args.context + args.steps) // block)
        heads = config["num_attention_heads"]
        geometry = KVGeometry(
            num_layers=config["num_hidden_layers"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            block_size=block,
            num_blocks=max(args.batch) * self._width,
            num_channels=8,
            dtype=args.kv_dtype or args.dtype,
        )
        device = EmulatedNpu(8, geometry.bank_bytes * geometry.num_tensors + (1 << 20))
        self._pool = KVPool(device, geometry)
        for channel in device.host_channels():
            channel[:] = 0  # untouched pages would all be the one zero page
        # Not at the top: vLLM's start-up trips over llvmlite where that is imported already.
        from decode_worker.engines.cpu.engine import CpuEngine

        self._engine = CpuEngine(args.model, device, geometry, self._pool.bases, dtype=args.dtype, threads=args.threads)
        self._context = args.context

    def round(self, batch: int, steps: int) -> list[dict[str, float]]:
        """Seconds of each step."""
        blocks = np.arange(batch * self._width, dtype=np.int32).reshape(batch, self._width)
        tokens, out = np.full(batch, 100, np.int32), []
        for step in range(steps):
            start = time.perf_counter()
            positions = np.full(batch, self._context + step, np.int32)
            scores = self._engine.step(DecodeBatch(tokens, positions, blocks))
            tokens = scores.logits().argmax(axis=1).astype(np.int32)
            out.append({"hawk": time.perf_counter() - start})
        return out


class Vllm:
    """vLLM's engine in this process, without prefix cache and asynchronous scheduling."""

    def __init__(self, args: argparse.Namespace) -> None:
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(args.threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM, SamplingParams

        length = args.context + args.steps + 2
        llm = LLM(
            str(args.model),
            dtype=args.dtype,
            max_model_len=length,
            max_num_seqs=max(args.batch),
            max_num_batched_tokens=max(args.batch) * length,
            enforce_eager=not args.compile,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        self._engine = llm.llm_engine
        self._context, self._serial, self._model_s = args.context, 0, 0.0
        self._vocab = llm.model_config.get_vocab_size()
        self._sampling = SamplingParams(temperature=0, max_tokens=args.steps + 1, ignore_eos=True, detokenize=False)
        executor = self._engine.engine_core.engine_core.model_executor
        for name in ("execute_model", "sample_tokens"):
            setattr(executor, name, self._timed(getattr(executor, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._model_s += time.perf_counter() - start

        return timed

    def round(self, batch: int, steps: int) -> list[dict[str, float]]:
        """Seconds of each step after the one that prefills all prompts."""
        rng = np.random.default_rng(self._serial)
        for _ in range(batch):
            self._serial += 1
            prompt = rng.integers(10, self._vocab, self._context).tolist()
            self._engine.add_request(str(self._serial), {"prompt_token_ids": prompt}, self._sampling)
        self._engine.step()
        out = []
        for _ in range(steps):
            self._model_s, start = 0.0, time.perf_counter()
            self._engine.step()
            out.append({"vllm": time.perf_counter() - start, "vllm-model": self._model_s})
        if self._engine.has_unfinished_requests():
            raise RuntimeError("vLLM did not decode all sequences together; the times would not compare")
        return out


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per (batch, engine), over all rounds; `tokens_per_s` is from the median step."""
    config = json.loads((args.model / "config.json").read_text())
    vllm = Vllm(args)
    ours = Ours(args, config)
    rows = []
    for batch in args.batch:
        vllm.round(batch, args.steps)
        ours.round(batch, args.steps)
        times: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for step in [*vllm.round(batch, args.steps), *ours.round(batch, args.steps)]:
                for name, seconds in step.items():
                    times.setdefault(name, []).append(seconds)
        base = statistics.median(times["vllm"])
        for name, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(
                {
                    "engine": name,
                    "batch": batch,
                    "step_ms": median * 1e3,
                    "step_ms_min": min(seconds) * 1e3,
                    "tokens_per_s": batch / median,
                    "ratio_to_vllm": base / median,
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'engine':11} {'batch':>5} {'step ms':>8} {'min':>8} {'tokens/s':>9} {'x vllm':>7}"]
    lines += [
        f"{row['engine']:11} {row['batch']:5d} {row['step_ms']:8.1f} {row['step_ms_min']:8.1f} "
        f"{row['tokens_per_s']:9.1f} {row['ratio_to_vllm']:7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.model is None:
        from deploy.model import ensure

        args.model = ensure()
    bandwidth = read_bandwidth()
    rows = measure(args)
    weights = sum(file.stat().st_size for file in args.model.glob("*.safetensors"))
    if not args.json:
        print(table(rows))
        print(f"one thread reads {bandwidth:.1f} GB/s; checkpoint {weights / 1e6:.0f} MB")
    settings = {
        "dtype": args.dtype, "kv_dtype": args.kv_dtype or args.dtype, "context": args.context,
        "threads": args.threads, "vllm_compile": args.compile,
    }  # fmt: skip
    print(json.dumps({"settings": settings, "read_gb_per_s": bandwidth, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
