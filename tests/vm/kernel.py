"""The guests' kernel: the distribution's stock one, downloaded and unpacked into the cache, never installed."""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .host import HERE, Unavailable, cache

META_PACKAGES = ("linux-image-amd64", "linux-image-generic")
"""Debian's, Ubuntu's. The flavour matters: Debian's `cloud` kernel has no rdma_rxe."""
PARTS = ("linux-image", "linux-binary", "linux-modules", "linux-modules-extra")
"""Where a kernel version's files are, depending on the distribution and its age."""
INITRAMFS_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""What it takes to reach the root file system; the other modules are loaded from there."""
XZ_MAGIC = b"\xfd7zXZ\x00"


@dataclass(frozen=True)
class Kernel:
    directory: Path

    @property
    def image(self) -> Path:
        return self.directory / "image"

    @property
    def initramfs(self) -> Path:
        return self.directory / "initramfs.gz"

    @property
    def modules(self) -> Path:
        """What a guest mounts as /lib/modules."""
        return self.directory / "modules"


def kernel() -> Kernel:
    """The cached kernel, made now where there is none. Raises Unavailable, with apt's words, where that fails."""
    with _locked():
        directory = cache() / f"kernel-{platform.freedesktop_os_release().get('VERSION_CODENAME', 'unknown')}"
        if not directory.is_dir():
            with tempfile.TemporaryDirectory(dir=cache(), prefix="kernel-") as work:
                made = Path(work) / "made"
                made.mkdir()
                _make(Path(work), made)
                made.rename(directory)
        stamp, script = directory / "initramfs.sh", (HERE / "boot" / "initramfs.sh").read_text()
        if not stamp.exists() or stamp.read_text() != script:
            _make_initramfs(directory)
            stamp.write_text(script)
        return Kernel(directory)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise Unavailable(f"{' '.join(map(str, command))} failed: {said}")
    return done.stdout


def _make(work: Path, made: Path) -> None:
    """Image, modules and their index into `made`."""
    debs = _download(work)
    for deb in debs:
        _run("dpkg-deb", "--extract", deb, work / "root")
    image = next((work / "root" / "boot").glob("vmlinuz-*"), None)
    modules = next((path for path in (work / "root").glob("**/lib/modules") if path.is_dir()), None)
    if image is None or modules is None:
        raise Unavailable(f"no kernel image or no modules in {', '.join(deb.name for deb in debs)}")
    (made / "image").write_bytes(_unpacked(image.read_bytes()))
    modules.rename(made / "modules")
    # kmod looks below a root for lib/modules.
    (made / "lib").mkdir()
    (made / "lib" / "modules").symlink_to("../modules")
    _run("depmod", "--basedir", made, _release(made))


def _release(directory: Path) -> str:
    return next((directory / "modules").iterdir()).name


def _unpacked(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage: under emulation a guest spends more time on unpacking it than on booting.

    As it is where it is packed in another way than by xz; it boots either way.
    """
    start = image.find(XZ_MAGIC)
    while start >= 0:
        with contextlib.suppress(lzma.LZMAError):
            unpacked = lzma.LZMADecompressor().decompress(image[start:])
            if unpacked.startswith(b"\x7fELF"):
                return unpacked
        start = image.find(XZ_MAGIC, start + 1)
    return image


def _download(work: Path) -> list[Path]:
    """The kernel's packages. apt's own lists are tried first, then fresh ones, which need no root either."""
    try:
        return _download_with(work / "debs", ())
    except Unavailable:
        lists = work / "apt"
        (lists / "partial").mkdir(parents=True)
        options = ("-o", f"Dir::State::Lists={lists}")
        _run("apt-get", *options, "update", "--quiet")
        return _download_with(work / "debs-fresh", options)


def _download_with(debs: Path, options: Sequence[str]) -> list[Path]:
    debs.mkdir()
    version = _newest_version(options)
    wanted = [f"{part}-{version}" for part in PARTS if _record(f"{part}-{version}", options)]
    _run("apt-get", *options, "download", *wanted, cwd=debs)
    return list(debs.glob("*.deb"))


def _newest_version(options: Sequence[str]) -> str:
    for meta in META_PACKAGES:
        if found := re.search(r"^Depends:.*?\blinux-image-(\d[^ ,]*)", _record(meta, options), re.MULTILINE):
            return found[1]
    raise Unavailable(f"apt-cache knows none of {', '.join(META_PACKAGES)}: can apt reach its sources?")


def _record(package: str, options: Sequence[str]) -> str:
    command = ["apt-cache", *options, "show", package]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _make_initramfs(directory: Path) -> None:
    """busybox, boot/initramfs.sh, and the modules that the root file system needs, in loading order."""
    with tempfile.TemporaryDirectory(dir=directory) as work:
        root = Path(work)
        for name in ("bin", "dev", "proc", "sys", "modules", "lower", "upper", "new"):
            (root / name).mkdir()
        shutil.copy("/bin/busybox", root / "bin")
        shutil.copy(HERE / "boot" / "initramfs.sh", root / "init")
        (root / "init").chmod(0o755)
        order: list[str] = []
        for source in _module_files(directory):
            name = source.name[: source.name.index(".ko") + 3]
            (root / "modules" / name).write_bytes(_module_content(source))
            order.append(name)
        (root / "modules" / "order").write_text("\n".join(order) + "\n")
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        archive = subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet", "--owner=0:0"],
            input=names.encode(),
            stdout=subprocess.PIPE,
            cwd=root,
            check=True,
        ).stdout
    # Not compressed any further than the kernel can undo at once.
    packed = subprocess.run(["gzip", "-1"], input=archive, stdout=subprocess.PIPE, check=True).stdout
    (directory / "initramfs.gz.new").write_bytes(packed)
    os.replace(directory / "initramfs.gz.new", directory / "initramfs.gz")


def _module_files(directory: Path) -> list[Path]:
    files: dict[Path, None] = {}
    for module in INITRAMFS_MODULES:
        command = ("modprobe", "--dirname", directory, "--set-version", _release(directory), "--show-depends", module)
        for line in _run(*command).splitlines():
            if line.startswith("insmod "):
                files[Path(line.split()[1])] = None
    return list(files)


def _module_content(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", path], stdout=subprocess.PIPE, check=True).stdout
    return path.read_bytes()
