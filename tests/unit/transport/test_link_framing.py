"""Packets on a stream: whatever way it is cut, and whatever somebody in between does to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.backends.link.framing import Datagrams, Frames
from transport.backends.link.packets import MAX_PACKET
from transport.errors import AuthenticationFailed, ProtocolError

TOKEN = "a-cluster-token-of-some-length"
CONTEXT = (b"the writer's nonce", b"the receiver's nonce")


def pair(token: str = TOKEN, context: tuple[bytes, ...] = CONTEXT) -> tuple[Frames, Frames]:
    """A writer's and a receiver's end after the handshake."""
    writer, receiver = Frames(), Frames()
    writer.seal(TOKEN, "writer", CONTEXT)
    receiver.seal(token, "receiver", context)
    return writer, receiver


def popped(frames: Frames, data: bytes) -> list[bytes]:
    frames.feed(data)
    return list(iter(frames.pop, None))


def test_datagrams_are_packets_as_they_are() -> None:
    datagrams = Datagrams()
    datagrams.feed(datagrams.wrap(b"one"))
    datagrams.feed(datagrams.wrap(b"two"))
    assert [datagrams.pop(), datagrams.pop(), datagrams.pop()] == [b"one", b"two", None]


@given(st.lists(st.binary(max_size=300), max_size=8), st.data(), st.booleans())
def test_packets_come_out_whole_however_the_stream_is_cut(
    packets: list[bytes], data: st.DataObject, sealed: bool
) -> None:
    sender, receiver = pair() if sealed else (Frames(), Frames())
    stream = b"".join(sender.wrap(packet) for packet in packets)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10).map(sorted))
    parts = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [packet for part in parts for packet in popped(receiver, part)] == packets


def test_both_directions_are_sealed() -> None:
    writer, receiver = pair()
    assert popped(receiver, writer.wrap(b"to")) == [b"to"]
    assert popped(writer, receiver.wrap(b"fro")) == [b"fro"]


def test_a_frame_sent_back_is_refused() -> None:
    writer, _ = pair()
    with pytest.raises(AuthenticationFailed):
        popped(writer, writer.wrap(b"reflected"))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_changed_frame_is_refused(packet: bytes, data: st.DataObject) -> None:
    writer, receiver = pair()
    frame = bytearray(writer.wrap(packet))
    # The length apart: one that is too long makes the receiver wait for bytes, which the next frame brings.
    frame[data.draw(st.integers(4, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(AuthenticationFailed):
        popped(receiver, bytes(frame))


def test_a_changed_length_is_refused_once_the_bytes_are_there() -> None:
    for change in (-1, 1):
        writer, receiver = pair()
        frame = bytearray(writer.wrap(b"packet"))
        frame[3] += change
        with pytest.raises(AuthenticationFailed):
            popped(receiver, bytes(frame) + writer.wrap(b"next"))


def test_a_frame_made_without_the_token_is_refused() -> None:
    _, receiver = pair()
    stranger = Frames()
    stranger.seal("another token", "writer", CONTEXT)
    with pytest.raises(AuthenticationFailed):
        popped(receiver, stranger.wrap(b"forged"))


def test_an_unsealed_frame_is_refused_after_the_handshake() -> None:
    _, receiver = pair()
    with pytest.raises(AuthenticationFailed):
        popped(receiver, Frames().wrap(b"a packet of some length") + Frames().wrap(b"and another one"))


def test_a_frame_of_another_connection_is_refused() -> None:
    writer, receiver = pair(context=(b"the writer's nonce", b"a later nonce"))
    with pytest.raises(AuthenticationFailed):
        popped(receiver, writer.wrap(b"recorded"))


def test_a_replayed_frame_is_refused() -> None:
    writer, receiver = pair()
    frame = writer.wrap(b"once")
    assert popped(receiver, frame) == [b"once"]
    with pytest.raises(AuthenticationFailed):
        popped(receiver, frame)


def test_a_frame_after_one_that_was_left_out_is_refused() -> None:
    writer, receiver = pair()
    writer.wrap(b"left out")
    with pytest.raises(AuthenticationFailed):
        popped(receiver, writer.wrap(b"next"))


def test_frames_in_another_order_are_refused() -> None:
    writer, receiver = pair()
    first, second = writer.wrap(b"first"), writer.wrap(b"second")
    with pytest.raises(AuthenticationFailed):
        popped(receiver, second + first)


def test_a_truncated_frame_is_no_packet() -> None:
    writer, receiver = pair()
    frame = writer.wrap(b"packet")
    for length in range(len(frame)):
        fresh = pair()[1]
        assert popped(fresh, frame[:length]) == []
    assert popped(receiver, frame) == [b"packet"]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_length_over_the_limit_is_refused_before_the_bytes_come(sealed: bool) -> None:
    receiver = pair()[1] if sealed else Frames()
    with pytest.raises(ProtocolError, match=f"{MAX_PACKET + 1} bytes"):
        popped(receiver, (MAX_PACKET + 1).to_bytes(4, "big") + bytes(16))


def test_the_longest_packet_passes() -> None:
    writer, receiver = pair()
    assert popped(receiver, writer.wrap(bytes(MAX_PACKET))) == [bytes(MAX_PACKET)]
