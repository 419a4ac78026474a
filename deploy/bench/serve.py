"""`hawk bench serve`: TTFT, TPOT and tokens/s through the three roles, against the same vLLM alone.

Both systems get the same cores, engine settings and prompts; their rounds alternate in one run, so that what
else the machine does hits both alike. Every prompt is new: no prefix cache helps either. Loads: `wave` sends
all at once and waits for all (compare TTFT and TPOT there), `closed` keeps that many in flight (tokens/s).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.bench.load import Load, closed_loop, make_prompts, summary, waves
from deploy.bench.servers import Servers, ServeSetup, start_hawk, start_vllm

LOADS = {"wave": waves, "closed": closed_loop}
LEAST_REQUESTS = 4


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hawk bench serve", description=__doc__)
    parser.add_argument("--model", type=Path, help="HF model directory (default: the default model)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--load", nargs="+", default=list(LOADS), choices=LOADS, help="how requests arrive")
    parser.add_argument("--requests", type=int, default=2, help="requests per round and client in flight")
    parser.add_argument("--rounds", type=int, default=2, help="alternating rounds per system")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each engine")
    parser.add_argument("--cores", type=int, nargs="+", help="CPUs of each system (default: all there are)")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="prefill tokens per engine step, both systems")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args(argv)
    for name in ("prompt_tokens", "output_tokens", "requests", "rounds", "threads", "chunk_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if min(args.concurrency) < 1:
        parser.error("--concurrency must be at least 1")
    return args


def compare(args: argparse.Namespace, setup: ServeSetup, systems: Mapping[str, Servers]) -> list[dict[str, Any]]:
    """Measure every load and concurrency on both systems → one row per (system, load, concurrency)."""
    for system in systems.values():  # page in, open connections: not measured
        warm = make_prompts(setup.model, 2, args.prompt_tokens, seed=-1)
        asyncio.run(waves(system.url, setup.name, warm, concurrency=2, output_tokens=args.output_tokens))
    rows: list[dict[str, Any]] = []
    seed = 0
    for concurrency in args.concurrency:
        count = max(LEAST_REQUESTS, args.requests * concurrency)
        for load in args.load if concurrency > 1 else args.load[:1]:  # one at a time, they are the same
            loads: dict[str, list[Load]] = {name: [] for name in systems}
            for number in range(args.rounds):
                seed += 1
                prompts = make_prompts(setup.model, count, args.prompt_tokens, seed)
                for name in list(systems) if number % 2 == 0 else list(reversed(systems)):
                    print(f"{name}: {count} requests, {concurrency} at a time ({load}) …", file=sys.stderr, flush=True)
                    run = LOADS[load](
                        systems[name].url,
                        setup.name,
                        prompts,
                        concurrency=concurrency,
                        output_tokens=args.output_tokens,
                    )
                    loads[name].append(asyncio.run(run))
            rows += [
                {"system": name, "load": load, "concurrency": concurrency, **summary(loads[name])} for name in systems
            ]
    return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hawk against vLLM alone for each load and concurrency; `added_ttft_percent` compares the medians."""
    out: list[dict[str, Any]] = []
    for hawk in (row for row in rows if row["system"] == "hawk"):
        key = {"load": hawk["load"], "concurrency": hawk["concurrency"]}
        vllm = next(row for row in rows if row["system"] == "vllm" and key.items() <= row.items())
        ratio = key | {
            "added_ttft_percent": 100 * (hawk["ttft_ms_p50"] / vllm["ttft_ms_p50"] - 1),
            "added_ttft_ms": hawk["ttft_ms_p50"] - vllm["ttft_ms_p50"],
            "tokens_per_s_ratio": hawk["tokens_per_s"] / vllm["tokens_per_s"],
        }
        if "tpot_ms_p50" in hawk and "tpot_ms_p50" in vllm:
            ratio["tpot_ratio"] = hawk["tpot_ms_p50"] / vllm["tpot_ms_p50"]
        out.append(ratio)
    return out


def table(rows: Sequence[Mapping[str, Any]], comparison: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'system':8} {'load':>6} {'conc':>4} {'TTFT ms':>9} {'max':>9} {'TPOT ms':>9} {'tokens/s':>9}"]
    for row in rows:
        tpot = f"{row['tpot_ms_p50']:9.1f}" if "tpot_ms_p50" in row else " " * 9
        lines.append(
            f"{row['system']:8} {row['load']:>6} {row['concurrency']:4d} {row['ttft_ms_p50']:9.1f} "
            f"{row['ttft_ms_max']:9.1f} {tpot} {row['tokens_per_s']:9.1f}"
        )
    for ratio in comparison:
        tpot = f", TPOT {ratio['tpot_ratio']:.2f}x" if "tpot_ratio" in ratio else ""
        lines.append(
            f"{ratio['load']}, concurrency {ratio['concurrency']}: TTFT {ratio['added_ttft_percent']:+.1f}% "
            f"({ratio['added_ttft_ms']:+.1f} ms){tpot}, tokens/s {ratio['tokens_per_s_ratio']:.2f}x"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    from deploy.model import ensure

    model = args.model or ensure()
    setup = ServeSetup(
        model=model,
        name="bench",
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.output_tokens + 32,
        max_num_seqs=max(8, *args.concurrency),
        chunk_tokens=args.chunk_tokens,
        threads=args.threads,
        cores=tuple(args.cores or sorted(os.sched_getaffinity(0))),
    )
    with tempfile.TemporaryDirectory(prefix="hawk-bench-") as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        with start_vllm(setup, logs) as vllm, start_hawk(setup, logs) as hawk:
            print("starting both systems …", file=sys.stderr, flush=True)
            vllm.wait(f"{vllm.url}/health")
            hawk.wait(f"{hawk.url}/ready")
            rows = compare(args, setup, {"vllm": vllm, "hawk": hawk})
    result = {
        "setup": {
            "model": model.name,
            "dtype": setup.dtype,
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "threads": setup.threads,
            "cores": list(setup.cores),
            "chunk_tokens": setup.chunk_tokens,
            "rounds": args.rounds,
        },
        "results": rows,
        "ratios": ratios(rows),
    }
    if not args.json:
        print(table(rows, result["ratios"]), file=sys.stderr)
    print(json.dumps(result, indent=None if args.json else 2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
