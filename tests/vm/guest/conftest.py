"""Keeps the tests of this folder where they belong."""

from __future__ import annotations

import os

import pytest

if not os.environ.get("HAWK_GUEST"):
    raise pytest.UsageError("these tests need a guest: tests/vm/run --pytest tests/vm/guest")
