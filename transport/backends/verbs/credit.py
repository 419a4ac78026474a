"""How many announcements of a lease may be under way: as many as its lane has receives for."""

from __future__ import annotations

RECEIVES = 16
"""Receives that the receiver posts on a lane; each immediate uses one up until the event loop has seen it.

A writer that sent more would be told to wait by the NIC, and after a few tries its push would fail, only because
the receiver's loop was busy for some 60 ms. So it waits for the receiver's word instead.
"""
TELL = RECEIVES // 4
"""Immediates taken between two such words."""
