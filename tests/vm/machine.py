"""One guest: a QEMU process that boots the kernel over the host's own files and runs one command."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from .host import HERE, Unavailable, cache
from .kernel import Kernel, kernel

TIMED_OUT = 124
DIED = 125
STOPPED = 143
"""Exit codes besides the command's own: the guest ran into its time limit, ended without a word, or was stopped."""

GRACE_S = 20
STEADY_NS = 8
"""About what an emulated instruction takes on an idle host, as a power of two."""
USUAL = re.compile(r"sysrq: Power Off|reboot: Power down|module ui-ui-\w+ not found|terminating on signal 15")
"""What a console says whenever a guest ends, and what says nothing about the guest."""


@dataclass(frozen=True)
class Spec:
    """What a guest is to be.

    `link` is what Soft-RoCE (rxe0) runs on: `veth`, `lo`, or `wire`, which needs `wire_fd`, one end of a socket pair
    that stands for the cable. All that the guest writes outside of `out` is gone afterwards.
    """

    command: str
    out: Path
    link: str = "veth"
    address: str = "10.99.0.1"
    wire_fd: int | None = None
    limit_s: float = 240
    memory_mb: int = 2048
    steady: bool = False
    """The guest's clock counts its instructions, STEADY_NS for each, and jumps to the next timer when there is nothing
    to do: what it measures is the same whatever else the host does. A guest of its own: emulated, and off the wire."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides HAWK_GUEST=1 and HAWK_OUT, which every command finds."""


@dataclass(frozen=True)
class Result:
    code: int
    output: str
    """What the command printed, both streams."""
    console: str
    """What the kernel and QEMU printed."""
    seconds: float

    def __str__(self) -> str:
        why = {TIMED_OUT: " (time limit)", DIED: " (the guest died)", STOPPED: " (stopped)"}.get(self.code, "")
        console = f"\n---- console\n{self.console[-3000:]}" if self.console.strip() else ""
        return f"exit code {self.code}{why} after {self.seconds:.0f} s\n{self.output[-20000:]}{console}"


class Machine:
    """A guest, started. It ends by itself, at its time limit at the latest."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._started = time.monotonic()
        self._output = spec.out / "output.log"
        self._console = spec.out / "console.log"
        self._shown = 0
        self._stopped = False
        spec.out.mkdir(parents=True, exist_ok=True)
        (spec.out / "exit_code").unlink(missing_ok=True)
        self._output.write_bytes(b"")
        booted = kernel()
        _write_orders(spec, booted)
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                ["timeout", "--kill-after=5", str(spec.limit_s), *_qemu(spec, booted)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                pass_fds=() if spec.wire_fd is None else (spec.wire_fd,),
            )

    def follow(self, stream: TextIO, prefix: str = "") -> bool:
        """Copy the lines that the command has printed since the last call; whether the guest still runs."""
        running = self._process.poll() is None
        with self._output.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        if running:  # a last line without its end is kept until there is nothing more to wait for
            new = new[: new.rfind(b"\n") + 1]
        self._shown += len(new)
        for line in new.decode(errors="replace").splitlines():
            print(f"{prefix}{line}", file=stream, flush=True)
        return running

    def failed(self) -> bool:
        """Whether the guest has ended, and not well."""
        return self._process.poll() is not None and self._code() != 0

    def stop(self) -> None:
        """Ends the guest if it still runs; idempotent."""
        if self._process.poll() is None:
            self._stopped = True
            self._process.terminate()
        self._process.wait()

    def result(self) -> Result:
        """Of a guest that has ended."""
        console = "\n".join(
            line
            for line in self._console.read_text(errors="replace").replace("\r", "").splitlines()
            if not USUAL.search(line)
        )
        output = self._output.read_text(errors="replace")
        return Result(self._code(), output, console, time.monotonic() - self._started)

    def _code(self) -> int:
        said = self.spec.out / "exit_code"
        if said.exists() and (text := said.read_text().strip()):
            return int(text)
        if self._stopped:
            return STOPPED
        return TIMED_OUT if self._process.returncode == TIMED_OUT else DIED


def _write_orders(spec: Spec, booted: Kernel) -> None:
    """What boot/guest.sh reads."""
    orders = {
        "HAWK_LINK": spec.link,
        "HAWK_ADDRESS": spec.address,
        "HAWK_MODULES": str(booted.modules),
        "HAWK_DIRECTORY": os.getcwd(),
    }
    exported = {"HAWK_GUEST": "1", "HAWK_OUT": str(spec.out), "PYTHONUNBUFFERED": "1", **spec.environment}
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in orders.items()]
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in exported.items()]
    (spec.out / "guest.env").write_text("".join(lines))
    (spec.out / "command.sh").write_text(spec.command + "\n")


def _qemu(spec: Spec, booted: Kernel) -> list[str]:
    shares = [("root", "/", ",readonly=on"), ("out", str(spec.out), "")]
    devices: list[str] = ["-device", "virtio-rng-pci"]
    for tag, path, mode in shares:
        escaped = path.replace(",", ",,")
        devices += ["-fsdev", f"local,id={tag},path={escaped},security_model=none,multidevs=remap{mode}"]
        devices += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    if spec.wire_fd is not None:
        station = spec.address.rsplit(".", 1)[1]
        devices += ["-netdev", f"socket,id=wire,fd={spec.wire_fd}"]
        devices += ["-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:00:00:{int(station):02x}"]
    orders = f'HAWK_OUT="{spec.out}" HAWK_INIT="{HERE / "boot" / "guest.sh"}"'
    machine = _bare(booted, "tcg" if spec.steady else accelerator(), spec.memory_mb, orders)
    return (_steady(machine) if spec.steady else machine) + devices


def _steady(emulated: list[str]) -> list[str]:
    """An instruction counter takes one thread for guest and devices."""
    shift = STEADY_NS.bit_length() - 1
    single = ["tcg,thread=single" if argument == "tcg,thread=multi" else argument for argument in emulated]
    return [*single, "-icount", f"shift={shift},sleep=off"]


def _bare(booted: Kernel, accel: str, memory_mb: int, orders: str) -> list[str]:
    cpu = {"kvm": ("-accel", "kvm", "-cpu", "host"), "tcg": ("-accel", "tcg,thread=multi", "-cpu", "max")}[accel]
    quiet = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off random.trust_cpu=on"
    return [
        *("qemu-system-x86_64", *cpu, "-smp", "1", "-m", str(memory_mb)),
        *("-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(booted.image), "-initrd", str(booted.initramfs), "-append", f"{quiet} {orders}"),
    ]


@functools.cache
def accelerator() -> str:
    """`kvm` where a kernel boots under it, else `tcg`; HAWK_VM_ACCEL decides without asking.

    A readable /dev/kvm is no proof: inside some virtual machines guests hang. So one is tried, once per host boot.
    """
    if chosen := os.environ.get("HAWK_VM_ACCEL"):
        if chosen not in ("kvm", "tcg"):
            raise Unavailable(f"HAWK_VM_ACCEL={chosen}: expected kvm or tcg")
        return chosen
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = cache() / "accelerator"
    if known.exists() and known.read_text().startswith(boot):
        return known.read_text().split()[1]
    probe = ["timeout", "--signal=KILL", "5", *_bare(kernel(), "kvm", 512, "HAWK_PROBE=1")]
    done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    found = "kvm" if "guest: alive" in done.stdout else "tcg"
    known.write_text(f"{boot} {found}\n")
    return found


def run(specs: Sequence[Spec], prefixes: Sequence[str], stream: TextIO) -> list[Result]:
    """Run guests side by side, their output copied to `stream` as it comes.

    Once one has failed the others get GRACE_S to end too: nobody waits out a time limit for a peer that is gone.
    """
    machines: list[Machine] = []
    give_up = math.inf
    try:
        machines += map(Machine, specs)
        while time.monotonic() < give_up:
            running = [machine.follow(stream, prefix) for machine, prefix in zip(machines, prefixes, strict=True)]
            if not any(running):
                break
            if give_up == math.inf and any(machine.failed() for machine in machines):
                give_up = time.monotonic() + GRACE_S
            time.sleep(0.1)
        for machine in machines:
            machine.stop()
        return [machine.result() for machine in machines]
    finally:
        for machine in machines:
            machine.stop()
