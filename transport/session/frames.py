"""One session frame per message: msgpack of `[tag, body]`.

`tag` is the message's type name and `body` its fields, validated by pydantic on receipt. `Tokens` is the hot
path (one frame per engine step) and goes as bare lists: an item is `[request_id, token]`, or
`[request_id, [tokens], finish_reason, logprobs]` when there is more to say.
"""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
from pydantic import ValidationError

from transport import messages
from transport.errors import ProtocolError
from transport.messages import FinishReason, Logprob, Message, TokenItem, Tokens

DEFAULT_MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens, with its block hashes, takes about 6 MB."""

_TAG_TOKENS = "Tokens"
_FINISH: dict[str | None, FinishReason | None] = {None: None, "stop": "stop", "length": "length"}
_CONTROL: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in vars(messages).values()
    if isinstance(cls, type) and issubclass(cls, Message) and cls is not Message
}


def encode(message: Message | Tokens) -> bytes:
    """The frame of a message. Raises ProtocolError if a field cannot be encoded (an int over 64 bits)."""
    try:
        if type(message) is Tokens:
            return _pack([_TAG_TOKENS, [_pack_item(item) for item in message.items]])
        assert isinstance(message, Message)
        return _pack([type(message).__name__, message.model_dump()])
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error


def decode(frame: bytes) -> Message | Tokens:
    """The message of a frame; raises ProtocolError for anything that `encode` would not have made."""
    try:
        tag, body = msgpack.unpackb(frame, max_ext_len=0)
    except Exception as error:
        raise ProtocolError(f"frame of {len(frame)} bytes is not a [tag, body] pair in msgpack: {error}") from error
    if tag == _TAG_TOKENS:
        return _tokens(body)
    cls = _CONTROL.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message type {str(tag)[:64]!r}")
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"bad {tag}: {where}: {first['msg']} ({error.error_count()} errors)") from error
    except RecursionError as error:
        raise ProtocolError(f"bad {tag}: nested too deeply") from error


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _pack_item(item: TokenItem) -> tuple[object, ...]:
    if item.finish_reason is None and item.logprobs is None and len(item.token_ids) == 1:
        return (item.request_id, item.token_ids[0])
    logprobs = item.logprobs
    return (
        item.request_id,
        item.token_ids,
        item.finish_reason,
        None if logprobs is None else [(entry.token, entry.logprob, entry.top) for entry in logprobs],
    )


def _tokens(body: Any) -> Tokens:
    """Checks shapes and ranges by hand: pydantic would cost more than the rest of the frame together."""
    try:
        items = []
        for packed in body:
            if len(packed) == 2:
                request_id, token = packed
                item = TokenItem(request_id, [token])
            else:
                request_id, token_ids, finish, logprobs = packed
                item = TokenItem(
                    request_id,
                    token_ids,
                    _FINISH[finish],
                    None if logprobs is None else [Logprob(token=t, logprob=p, top=top) for t, p, top in logprobs],
                )
            if type(request_id) is not str or type(item.token_ids) is not list:
                raise ValueError("an item is [str, int] or [str, [int], finish, logprobs]")
            for token in item.token_ids:
                if type(token) is not int or not 0 <= token < 1 << 31:
                    raise ValueError(f"token id {token!r}")
            items.append(item)
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"bad Tokens: {error}") from error
    return Tokens(items)
