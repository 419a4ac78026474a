"""What can go wrong between us and tt-kmd, each with what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from transport.errors import ConfigurationError

RELAY = "use `--kv-path relay`, which needs no window"


class NpuDriverError(ConfigurationError):
    """The kernel driver refused something. Its subclasses are the refusals that have a remedy of their own.

    `errno` is the driver's, 0 where it was not asked.
    """

    code = "npu_driver_error"

    def __init__(self, message: str, *, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


class NoNpuDevice(NpuDriverError):
    """There is no such device node: no driver loaded, no card, or not handed to this container."""

    code = "npu_device_missing"


class NpuAccessDenied(NpuDriverError):
    """The device node may not be opened."""

    code = "npu_access_denied"


class NpuBusy(NpuDriverError):
    """Another process has the device for itself."""

    code = "npu_busy"


class NpuGone(NpuDriverError):
    """The card was reset or removed after it was opened: this descriptor is of no more use."""

    code = "npu_gone"


class DriverTooOld(NpuDriverError):
    """The driver has no dma-buf export yet."""

    code = "npu_driver_too_old"


class ExportUnsupported(NpuDriverError):
    """The driver could export, but not on this kernel."""

    code = "npu_export_unsupported"


class NoWindows(NpuDriverError):
    """No window of the size is free, or the card has none of it."""

    code = "npu_no_windows"


class WindowInUse(NpuDriverError):
    """A window cannot be given back while somebody has it mapped."""

    code = "npu_window_in_use"


def open_failed(path: str, error: OSError, module_version: str | None) -> NpuDriverError:
    """`module_version`: of the loaded driver, None where none is loaded."""
    code = error.errno or 0
    if code == errno.ENOENT:
        if module_version is None:
            todo = "tt-kmd is not loaded: install it (2.10 or newer) and `modprobe tenstorrent`"
        else:
            todo = f"tt-kmd {module_version} is loaded, so the card is missing, or not handed to this container"
        return NoNpuDevice(f"there is no {path}: {todo}", errno=code)
    if code in (errno.EACCES, errno.EPERM):
        return NpuAccessDenied(
            f"{path} may not be opened: give this user access (tt-kmd's udev rule makes it 0666), or, in a "
            f"container, pass the device on (`--device {path}`)",
            errno=code,
        )
    if code in (errno.EAGAIN, errno.EBUSY):
        return NpuBusy(f"another process has {path} for itself{held_by(path)}: stop it", errno=code)
    if code in (errno.ENODEV, errno.ENXIO):
        return NpuGone(f"{path} has no card behind it any more: `tt-smi -r`, then start again", errno=code)
    return NpuDriverError(f"{path} cannot be opened: {_text(code)}", errno=code)


def call_failed(path: str, call: str, error: OSError) -> NpuDriverError:
    """`call`: what was tried, as in "export window 202"; for the codes that mean the same in every call."""
    code = error.errno or 0
    if code == errno.ENODEV:
        return NpuGone(
            f"cannot {call}: {path} was reset or removed since it was opened; restart the worker", errno=code
        )
    if code == errno.EBUSY:
        return WindowInUse(
            f"cannot {call}: it is still mapped; whoever maps it, perhaps a forked child, must let go first", errno=code
        )
    if code == errno.EPERM:
        return NpuDriverError(f"cannot {call}: it does not belong to this descriptor of {path}", errno=code)
    if code in (errno.EMFILE, errno.ENFILE):
        return NpuDriverError(f"cannot {call}: too many open files; raise `ulimit -n`", errno=code)
    return NpuDriverError(f"cannot {call} of {path}: {_text(code)}", errno=code)


def no_window(path: str, window: str, error: OSError, *, big: bool) -> NpuDriverError:
    """ALLOCATE_TLB failed. `window`: its size in words."""
    code = error.errno or 0
    if code in (errno.ENOMEM, errno.ENOSPC):
        return NoWindows(
            f"all {window} windows of {path} are taken{held_by(path)}: stop the process that holds them, or {RELAY}",
            errno=code,
        )
    if code == errno.EINVAL:
        todo = (
            "its BAR4 is too small; switch on Resizable BAR and Above 4G Decoding in the BIOS"
            if big
            else "it is no Blackhole"
        )
        return NoWindows(f"{path} has no {window} windows: {todo}, or {RELAY}", errno=code)
    return call_failed(path, f"allocate a {window} window", error)


def export_failed(path: str, call: str, error: OSError, version: str) -> NpuDriverError:
    """EXPORT_TLB_DMABUF failed."""
    code = error.errno or 0
    if code == errno.EOPNOTSUPP:
        return ExportUnsupported(
            f"cannot {call}: tt-kmd {version} exports dma-bufs on Linux 5.8 and newer only, this is "
            f"{os.uname().release}; upgrade the kernel, or {RELAY}",
            errno=code,
        )
    if code in (errno.ENOTTY, errno.ENOSYS):
        return too_old(path, version, code)
    return call_failed(path, call, error)


def too_old(path: str, version: str, code: int = 0) -> DriverTooOld:
    return DriverTooOld(
        f"{path} has tt-kmd {version}, which exports no dma-bufs: upgrade tt-kmd to 2.10 or newer, or {RELAY}",
        errno=code,
    )


def holders(path: str, proc: Path = Path("/proc")) -> list[tuple[int, str]]:
    """(pid, command) of the processes that have the device open, ourselves included; empty where it isn't told."""
    try:
        pids = (proc / "driver/tenstorrent" / Path(path).name / "pids").read_text().split()
    except OSError:
        return []
    found = []
    for pid in sorted({int(pid) for pid in pids if pid.isdigit()}):
        try:
            name = (proc / str(pid) / "comm").read_text().strip()
        except OSError:
            name = "?"
        found.append((pid, name))
    return found


def held_by(path: str) -> str:
    others = [f"{name} (pid {pid})" for pid, name in holders(path) if pid != os.getpid()]
    return f" (open in {', '.join(others)})" if others else ""


def _text(code: int) -> str:
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"
