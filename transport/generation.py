"""Generation ids: a new one for every life of a process, so that leftovers of an earlier life are told apart."""

from __future__ import annotations

import secrets


def new_generation() -> str:
    """A fresh id; a role makes one at start and puts it into everything it sends."""
    return secrets.token_hex(8)
