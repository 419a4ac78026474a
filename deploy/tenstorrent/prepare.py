"""Makes an installed ttnn able to open simulated and mock devices: python -m deploy.tenstorrent.prepare

Writes into the environment it runs in, and nowhere else. Running it again changes nothing.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

from decode_worker.npu.tenstorrent.simulator import state_directory
from deploy.tenstorrent.cluster import CHIPS, descriptor
from deploy.tenstorrent.environment import descriptor_path
from deploy.tenstorrent.kernel import kernel

STAND_IN = Path(__file__).parent / "compiler.sh"
COMPILER = Path("compiler/bin/riscv-tt-elf-g++")

#: where ttnn looks for the compiler, first its own directory
SYSTEM_SFPI = Path("/opt/tenstorrent/sfpi")


def prepare(site_packages: Path, system_sfpi: Path = SYSTEM_SFPI) -> str:
    """Puts the stand-in compiler where no real one is, firmware beside it, and writes the mock machines' descriptors.

    Returns in words what compiles for ttnn now. Raises FileNotFoundError where ttnn is not installed, or is another
    version whose wheel looks different.
    """
    ttnn = site_packages / "ttnn"
    precompiled = ttnn / "tt_metal" / "pre-compiled"
    if not precompiled.is_dir():
        raise FileNotFoundError(f"{precompiled} is missing: install deploy/requirements/ttnn.txt there (make env-ttnn)")
    state_directory(site_packages).mkdir(exist_ok=True)
    for chips in CHIPS:
        descriptor_path(site_packages, chips).write_text(descriptor(chips))
    compiler = ttnn / "runtime" / "sfpi" / COMPILER
    for real in (compiler, system_sfpi / COMPILER):
        if real.exists() and not _is_stand_in(real):
            return f"SFPI compiler: {real}"
    directory = compiler.parent
    directory.mkdir(parents=True, exist_ok=True)
    for banks, firmware in _firmware(precompiled):
        link = directory / "firmware" / "{}-{}".format(*banks)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(firmware)
    (directory / "kernel.elf").write_bytes(kernel())
    shutil.copy(STAND_IN, compiler)
    return "SFPI compiler: none, so the simulator runs no kernels and the mock device empty ones"


def _is_stand_in(compiler: Path) -> bool:
    with compiler.open("rb") as file:
        return b"hawk: stand-in" in file.read(100)


def _firmware(precompiled: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """((DRAM banks, L1 banks), directory) of the wheel's firmware for Blackhole, one for each pair of numbers.

    The wheel has several with the same numbers; their differences concern dispatch, which a slow-dispatch
    device doesn't do on its cores.
    """
    found: dict[tuple[int, int], Path] = {}
    for directory in sorted(precompiled.iterdir()):
        if (directory / "drisc").is_dir():  # a core that only Blackhole has
            found.setdefault(_banks(directory / "brisc" / "brisc.elf"), directory)
    yield from found.items()


def _banks(elf: Path) -> tuple[int, int]:
    """(DRAM banks, L1 banks) that firmware is made for: the lengths of its tables of bank offsets."""
    with elf.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab")
        dram, l1 = (
            symbols.get_symbol_by_name(name)[0]["st_size"] // 4 for name in ("bank_to_dram_offset", "bank_to_l1_offset")
        )
    return dram, l1


if __name__ == "__main__":
    print(prepare(Path(sysconfig.get_paths()["purelib"])))
