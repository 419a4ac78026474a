"""The `hawk` command: finds the subcommand, imports only what that one needs, and turns errors into messages."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from transport.errors import ConfigurationError, HawkError

VERSION = "0.1.0"

USAGE = """\
hawk: LLM serving with prefill on GPUs and decode on NPUs

usage: hawk COMMAND [flags]          hawk COMMAND --help shows the flags of one

run
  up         start a router, prefill and decode workers on this machine, and watch over them
  router     one router: the OpenAI API in front, sessions to workers behind
  prefill    one prefill worker (vLLM)
  decode     one decode worker (NPU)

look after
  model      models that Hawk sets up by itself: pull, list, path, verify
  doctor     check this machine and this installation, and say what to do; hawk doctor rdma: its RDMA devices
  bench      measure: hawk bench transfer | decode | serve

settings
  Each flag is also an environment variable (HAWK_UP_PORT, HAWK_PREFILL_DTYPE, …) and a key in a TOML file
  (--config FILE or HAWK_CONFIG, tables [up], [router], [prefill], [decode]). Flags win over the environment,
  the environment over the file. An unknown setting is refused.

examples
  hawk up                                          one of each, http://127.0.0.1:8000
  hawk up --prefill 2 --decode 2 --port 9000       four workers, another port
  HAWK_DECODE_KV_DTYPE=bfp8_b hawk up              a KV cache of half the size
  hawk doctor --json                               for a machine to read
  hawk bench transfer --json                       the KV transfer against its baselines

by hand, one process each (the same HAWK_TOKEN for all):
  export HAWK_TOKEN=$(openssl rand -hex 32)
  hawk decode  --port 8200
  hawk prefill --port 8100
  hawk router  --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""

#: command → (module, function that takes the remaining arguments and returns the exit status)
COMMANDS = {
    "up": ("deploy.launcher.up", "main"),
    "router": ("deploy.roles", "router"),
    "prefill": ("deploy.roles", "prefill"),
    "decode": ("deploy.roles", "decode"),
    "model": ("deploy.model_command", "main"),
    "doctor": ("deploy.doctor", "main"),
    "bench": ("deploy.cli", "bench"),
}
BENCHMARKS = {"transfer": "deploy.bench.transfer", "decode": "deploy.bench.decode", "serve": "deploy.bench.serve"}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error that was said, 2 a senseless command line, 130 interrupted, 141 output closed."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"hawk {VERSION}")
        return 0
    if args[0] not in COMMANDS:
        return _wrong(f"unknown command {args[0]!r}, expected one of: {', '.join(COMMANDS)}")
    try:
        return _command(*COMMANDS[args[0]])(args[1:])
    except ConfigurationError as error:
        return _wrong(error.message, status=1)
    except HawkError as error:
        return _wrong(f"{error.code}: {error.message}", status=1)
    except ModuleNotFoundError as error:
        return _wrong(f"{error}: the installation is incomplete; `make up` completes it, `hawk doctor` checks it", 1)
    except BrokenPipeError:  # `hawk … | head`; what the interpreter still flushes at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130


def bench(args: Sequence[str]) -> int:
    """`hawk bench NAME [flags]`."""
    if not args or args[0] not in BENCHMARKS:
        wanted = f"hawk bench {' | '.join(BENCHMARKS)}        (--help after the name shows its flags)"
        if args and args[0] in ("-h", "--help"):
            print(f"usage: {wanted}")
            return 0
        return _wrong(f"usage: {wanted}")
    return _command(BENCHMARKS[args[0]], "main")(list(args[1:]))


def _command(module: str, function: str) -> Callable[[list[str]], int]:
    def run(args: list[str]) -> int:
        status = int(getattr(importlib.import_module(module), function)(args) or 0)
        sys.stdout.flush()
        return status

    return run


def _wrong(message: str, status: int = 2) -> int:
    print(f"hawk: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
