"""The receiver's Unix socket: who may reach it, and what to do about one that is already there."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from transport.backends.link.framing import Datagrams
from transport.errors import ConfigurationError

_MAX_PATH_BYTES = 107


class Listener:
    """A listening SOCK_SEQPACKET socket at `path`, mode 0600, in a directory that others cannot write to.

    Missing directories are made with mode 0700. The socket file of a dead process is replaced.
    Raises ConfigurationError if the path is too long, not private, or in use.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigurationError(f"socket path is over {_MAX_PATH_BYTES} bytes, choose a shorter one: {path}")
        try:
            _make_private(Path(path).absolute().parent)
            _remove_stale(path)
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                os.fchmod(self.sock.fileno(), 0o600)  # before bind: the file is never open to others
                self.sock.bind(path)
                self.sock.listen(128)
            except BaseException:
                self.sock.close()
                raise
        except OSError as error:
            raise ConfigurationError(f"cannot listen on socket {path}: {error}") from error
        self.sock.setblocking(False)
        self._inode = os.stat(path).st_ino

    def framing(self) -> Datagrams:
        return Datagrams()

    def close(self) -> None:
        """Stop listening and remove the file, unless another process has put its own there."""
        self.sock.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)


def _make_private(directory: Path) -> None:
    for missing in reversed([directory, *directory.parents]):
        if not missing.exists():
            missing.mkdir(mode=0o700, exist_ok=True)
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigurationError(f"socket directory {directory} can be written by every user: chmod 700 it")


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError:
            pass
    raise ConfigurationError(f"socket {path} is in use by another process")
