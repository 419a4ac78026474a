"""Fake workers for tests and router benchmarks: real session servers whose behaviour is scripted."""

from transport.testing.decode import FakeDecode
from transport.testing.hosting import Hosted, hosted
from transport.testing.prefill import FakePrefill
from transport.testing.worker import FakeWorker, fake_model

__all__ = ["FakeDecode", "FakePrefill", "FakeWorker", "Hosted", "fake_model", "hosted"]
