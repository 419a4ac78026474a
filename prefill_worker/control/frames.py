"""Frames of the control socket: four bytes of length (big endian), then msgpack of `[type, fields]`."""

from __future__ import annotations

import msgpack
from pydantic import ValidationError

from prefill_worker.control.messages import MESSAGES
from transport.errors import ProtocolError
from transport.messages import Message

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 1024 * 1024


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb([type(message).__name__, message.model_dump()])
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """Raises ProtocolError if the frame would be over the limit."""
    length = int.from_bytes(header, "big")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"control frame of {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return length


def decode(body: bytes) -> Message:
    """Raises ProtocolError for anything that `encode` would not have made."""
    try:
        name, fields = msgpack.unpackb(body)
        return MESSAGES[name].model_validate(fields)
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        raise ProtocolError(f"bad control frame: {error}") from error
