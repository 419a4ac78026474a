"""`hawk model`: the models that Hawk sets up by itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deploy.model import DEFAULT, SOURCES, ensure, models_dir, verify

EXAMPLES = """\
examples:
  hawk model list
  hawk model pull                   make the default model ready (nothing to do when it is)
  hawk prefill --model "$(hawk model path)"
  hawk model verify                 re-read every file and compare its checksum
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hawk model", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="pull|list|path|verify")
    actions.add_parser("list", help="the models and whether they are ready")
    for action, text in (
        ("pull", "make a model ready"),
        ("path", "make a model ready and print its directory"),
        ("verify", "compare all files with their checksums"),
    ):
        sub = actions.add_parser(action, help=text)
        sub.add_argument("name", nargs="?", default=DEFAULT, choices=sorted(SOURCES))
    args = parser.parse_args(argv)
    match args.action:
        case "list":
            for name in SOURCES:
                directory = models_dir() / name
                print(f"{name}  {directory if directory.is_dir() else '(not pulled)'}")
        case "pull":
            print(f"{args.name} is ready in {ensure(args.name)}")
        case "path":
            print(ensure(args.name))
        case "verify":
            if wrong := verify(args.name):
                print(f"{args.name}: missing or changed: {', '.join(wrong)}; delete the directory and pull again")
                return 1
            print(f"{args.name}: all {len(SOURCES[args.name].outcome)} files match")
    return 0
