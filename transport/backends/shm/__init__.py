"""Shared memory on one host: writers map the decode worker's channels and store into them."""

from transport.backends.shm.receiver import ShmReceiver
from transport.backends.shm.writer import ShmPoolWriter, connect

__all__ = ["ShmPoolWriter", "ShmReceiver", "connect"]
