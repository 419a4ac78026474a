"""Work requests that are built once and filled anew for each post, which costs a twentieth of building them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from transport.backends.verbs.library import Library

Write = tuple[int, int, int, int, int]
"""(local address, lkey, length, remote address, rkey); length in bytes."""


class WriteChain:
    """A linked list of RDMA writes, shared by all queue pairs of a NIC. Thread-safe.

    A request's link cannot be cut again, so the list always ends at the same one, and a shorter chain begins further
    down. The device reads the list before `post_send` returns; then it is free for the next post. It lives as long
    as the NIC because pyverbs never frees the C half of a request (its destructors are misnamed, at least up to 64).
    """

    def __init__(self, library: Library) -> None:
        enums = library.enums
        self._library = library
        self._write = int(enums.IBV_WR_RDMA_WRITE)
        self._write_with_immediate = int(enums.IBV_WR_RDMA_WRITE_WITH_IMM)
        self._signaled = int(enums.IBV_SEND_SIGNALED)
        self._inline = int(enums.IBV_SEND_INLINE)
        self._lock = threading.Lock()
        self._requests: list[tuple[Any, Any, Callable[[int, int], None]]] = []  # the last one first

    def post(
        self,
        queue_pair: Any,
        writes: Sequence[Write],
        *,
        wr_id: int,
        immediate: int | None,
        signaled: bool,
        max_inline: int,
    ) -> None:
        """Post `writes` in order, then a zero-length write that carries `immediate`, to a pyverbs QP in one call.

        All bear `wr_id`, so that the one that fails says which post it was of; only the last is signalled.
        """
        with self._lock:
            queue_pair.post_send(self._fill(writes, wr_id, immediate, signaled, max_inline))

    def _fill(self, writes: Sequence[Write], wr_id: int, immediate: int | None, signaled: bool, max_inline: int) -> Any:
        if immediate is not None:
            writes = [*writes, (0, 0, 0, 0, 0)]
        self._grow(len(writes))
        position = len(writes)
        inline = self._inline
        for address, lkey, length, remote_address, rkey in writes:
            position -= 1
            request, piece, set_target = self._requests[position]
            piece.addr = address
            piece.length = length
            piece.lkey = lkey
            set_target(rkey, remote_address)
            request.wr_id = wr_id
            request.send_flags = inline if length <= max_inline else 0
        last = self._requests[0][0]
        if immediate is None:
            last.opcode = self._write
            last.num_sge = 1
        else:
            last.opcode = self._write_with_immediate
            last.num_sge = 0
            last.imm_data = socket.htonl(immediate)
            last.send_flags = 0
        if signaled:
            last.send_flags |= self._signaled
        return self._requests[len(writes) - 1][0]

    def _grow(self, length: int) -> None:
        wr = self._library.wr
        while len(self._requests) < length:
            piece = wr.SGE(0, 0, 0)
            request = wr.SendWR(0, self._write, 1, 0, [piece], 0)
            request.sg_list = piece  # its own copy of the piece could not be changed any more
            if self._requests:
                request.next_wr = self._requests[-1][0]
            self._requests.append((request, piece, request.set_wr_rdma))
