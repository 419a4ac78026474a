"""Which test files run in a guest, and what of them."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
_UNIT = _HERE.parent / "unit"
SHARED = (
    _UNIT / "transport" / "test_backend_contract.py",
    _UNIT / "decode_worker" / "test_staged_push.py",
)
"""Tests of all data planes, each a parameter of theirs: on verbs in a guest, on the others outside."""
FILES = {path.stem: path for path in [*sorted((_HERE / "guest").glob("test_*.py")), *SHARED]}
"""By name."""
SELECT = "verbs or not (shm or nixl)"
"""pytest's -k: the other data planes need no guest."""
