"""Session frames: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ProtocolError
from transport.messages import (
    Cancel,
    Decode,
    ErrorInfo,
    Failed,
    Lease,
    Logprob,
    Message,
    Prefill,
    Prefilled,
    Reserve,
    ResidentBlocks,
    Sampling,
    TokenItem,
    Tokens,
    Writer,
)
from transport.session.frames import DEFAULT_MAX_FRAME_BYTES, decode, encode

SAMPLING = Sampling(max_tokens=5, temperature=0.5, seed=2**62, stop_token_ids=(1, 2), logprobs=3)
LEASE = Lease(
    id="l", worker="d", generation="g", block_ids=(1, 2), prompt_tokens=40, resident_tokens=32, ttl_s=2.5, slot=3 << 16
)
MESSAGES: list[Message | Tokens] = [
    Reserve(
        request_id="r",
        prompt_tokens=40,
        max_tokens=5,
        block_hashes=(b"\x00\xff" * 8,),
        tail_tokens=(1, 2**31 - 1),
        writer=Writer(worker="p", generation="g"),
    ),
    Prefill(request_id="r", token_ids=(1, 2, 3), sampling=SAMPLING, lease=LEASE),
    Prefill(request_id="r", token_ids=(1,), sampling=SAMPLING),
    Prefilled(request_id="ü", token_ids=(7,), logprobs=(Logprob(token=7, logprob=-0.5, top=((7, -0.5), (8, -1.0))),)),
    Decode(request_id="r", lease_id="l", token_id=7, generated=1, sampling=SAMPLING),
    Cancel(request_id="r", reason="client gone"),
    Failed(request_id="r", error=ErrorInfo(code="push_failed", message="m", param=None)),
    ResidentBlocks(added=(b"a" * 16,), removed=(b"b" * 16,), reset=True),
    Tokens([]),
    Tokens([TokenItem("r", [5]), TokenItem("s", [1, 2], "stop"), TokenItem("t", [], "length")]),
    Tokens([TokenItem("r", [5], None, [Logprob(token=5, logprob=-1.5, top=((5, -1.5),))])]),
]

token_ids = st.integers(0, 2**31 - 1)
items = st.builds(
    TokenItem,
    st.text(max_size=40).filter(lambda text: text.isprintable()),
    st.lists(token_ids, max_size=4),
    st.sampled_from([None, "stop", "length"]),
    st.none() | st.lists(st.builds(Logprob, token=token_ids, logprob=st.floats(-100, 0)), max_size=3),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message | Tokens) -> None:
    assert decode(encode(message)) == message


@given(st.lists(items, max_size=20))
def test_tokens_survive_the_wire(batch: list[TokenItem]) -> None:
    assert decode(encode(Tokens(batch))) == Tokens(batch)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(frame)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
        max_leaves=20,
    ),
    st.sampled_from(["Tokens", "Cancel", "Prefill", "Hello", "Nonsense"]),
)
def test_any_body_is_a_message_or_a_protocol_error(body: object, tag: str) -> None:
    try:
        frame = msgpack.packb([tag, body])
    except UnicodeEncodeError:
        return
    with contextlib.suppress(ProtocolError):
        decode(frame)


@pytest.mark.parametrize(
    "item",
    [
        ["r", -1],
        ["r", 2**31],
        ["r", "5"],
        ["r", True],
        [5, 5],
        ["r"],
        ["r", 5, None, None],
        ["r", [5], "eos", None],
        ["r", [5], None, [[5]]],
        ["r", [5], None, [[5, "x", []]]],
        "r5",
        None,
    ],
)
def test_a_bad_tokens_item_is_a_protocol_error(item: object) -> None:
    with pytest.raises(ProtocolError, match="bad Tokens"):
        decode(msgpack.packb(["Tokens", [item]]))


def test_the_error_names_type_and_field() -> None:
    with pytest.raises(ProtocolError, match=r"bad Cancel: request_id: Field required"):
        decode(msgpack.packb(["Cancel", {}]))
    with pytest.raises(ProtocolError, match=r"bad Cancel: colour: Extra inputs are not permitted"):
        decode(msgpack.packb(["Cancel", {"request_id": "r", "colour": 1}]))
    with pytest.raises(ProtocolError, match="unknown message type 'Nonsense'"):
        decode(msgpack.packb(["Nonsense", {}]))


def test_what_does_not_fit_the_wire_is_refused_when_sent() -> None:
    with pytest.raises(ProtocolError, match="cannot encode Cancel"):
        encode(Cancel.model_construct(request_id="r", reason="lone \ud800 surrogate"))


def test_a_prompt_of_a_million_tokens_fits_a_frame() -> None:
    prompt = Prefill(request_id="r", token_ids=tuple(range(1_000_000)), sampling=SAMPLING, lease=LEASE)
    frame = encode(prompt)
    assert len(frame) < DEFAULT_MAX_FRAME_BYTES
    assert decode(frame) == prompt
