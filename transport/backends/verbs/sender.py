"""What a writing process has of its NICs: opened once, with one staging memory registered on all of them."""

from __future__ import annotations

import os
import threading

from transport.backends.base import WriterOptions
from transport.backends.link.staging import StagingMemory
from transport.backends.verbs.devices import choose
from transport.backends.verbs.nic import OpenNic


class Sender:
    """`nics`, the `staging` memory, and `lkeys[n]`, by which NIC n reads there. Raises ConfigurationError."""

    def __init__(self, options: WriterOptions) -> None:
        self.nics: list[OpenNic] = []
        self.staging = StagingMemory(options.staging_bytes)
        try:
            for nic in choose(options.devices):
                self.nics.append(OpenNic(nic))
            self._registrations = [
                nic.register(self.staging.address, self.staging.size, remote_write=False) for nic in self.nics
            ]
        except BaseException:
            self.close()
            raise
        self.lkeys = [registration.lkey for registration in self._registrations]

    def close(self) -> None:
        for nic in self.nics:
            nic.close()


_lock = threading.Lock()
_senders: dict[WriterOptions, tuple[Sender, int]] = {}


def acquire(options: WriterOptions) -> Sender:
    """The process's sender for these options; pairs with `release`."""
    with _lock:
        sender, users = _senders.get(options, (None, 0))
        if sender is None:
            sender = Sender(options)
        _senders[options] = (sender, users + 1)
        return sender


def release(options: WriterOptions) -> None:
    """The last one closes it, so that a NIC that comes back after a failure is opened anew."""
    with _lock:
        sender, users = _senders[options]
        if users > 1:
            _senders[options] = (sender, users - 1)
        else:
            del _senders[options]
            sender.close()


def _forget_in_child() -> None:
    """A forked child that connects opens the NICs for itself."""
    global _lock
    _lock = threading.Lock()
    _senders.clear()


os.register_at_fork(after_in_child=_forget_in_child)
