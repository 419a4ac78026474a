"""Keeps the tests of this folder where they belong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if not os.environ.get("HAWK_GUEST"):
    raise pytest.UsageError("these tests need a guest: tests/vm/run --pytest tests/vm/guest")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit" / "transport"))  # the contract test's harness
