"""The service's view of the decode workers' pools: who asked for which, and which are open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transport.errors import InvalidRequest, StaleGeneration, UnknownPool
from transport.messages import ClosePool, ErrorInfo, Lease, Message, OpenPool, PoolDescription, PoolOpened, PoolRefused
from transport.session.server import Session


@dataclass(slots=True)
class Entry:
    """One generation of one decode worker's pool."""

    pool: PoolDescription
    open: bool = False
    sessions: dict[int, Session] = field(default_factory=dict)


class PoolTable:
    """Forwards openings and closings to the engine (`send`), which is connected; several routers share a pool.

    A generation takes the place of another one when the engine has opened it, not when somebody asks for it: a
    router that is behind the times must not take a pool from the others.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._entries: dict[tuple[str, str], Entry] = {}

    @property
    def open_count(self) -> int:
        return sum(entry.open for entry in self._entries.values())

    def ask(self, session: Session, pool: PoolDescription) -> None:
        """A router wants `pool` open; it is answered at once where it is open already, else by `answer`."""
        entry = self._entries.get((pool.worker, pool.generation))
        if entry is None:
            entry = self._entries[pool.worker, pool.generation] = Entry(pool)
            self._send(OpenPool(pool=pool))
        entry.sessions[session.id] = session
        if entry.open:
            session.send(PoolOpened(worker=pool.worker, generation=pool.generation))

    def answer(self, message: PoolOpened | PoolRefused) -> None:
        """The engine's answer, or its word that an open pool is lost: passed on to all that asked."""
        entry = self._entries.get((message.worker, message.generation))
        if entry is None:
            return
        if isinstance(message, PoolOpened):
            for other in self._opened(message.worker):
                if other is not entry:
                    reason = StaleGeneration(f"generation {message.generation} of {message.worker} took its place")
                    generation = other.pool.generation
                    self._end(
                        other, PoolRefused(worker=message.worker, generation=generation, error=ErrorInfo.of(reason))
                    )
            entry.open = True
            for session in entry.sessions.values():
                session.send(message)
        else:
            self._end(entry, message)

    def leave(self, session: Session, worker: str, generation: str) -> None:
        """A router is done with a pool; the last one closes it."""
        entry = self._entries.get((worker, generation))
        if entry is None or entry.sessions.pop(session.id, None) is None or entry.sessions:
            return
        del self._entries[worker, generation]
        self._send(ClosePool(worker=worker, generation=generation))

    def leave_all(self, session: Session) -> None:
        for entry in list(self._entries.values()):
            self.leave(session, entry.pool.worker, entry.pool.generation)

    def check(self, lease: Lease, prompt_tokens: int) -> None:
        """Raises UnknownPool, StaleGeneration, or InvalidRequest where the lease does not fit pool or prompt."""
        entry = self._entries.get((lease.worker, lease.generation))
        if entry is None or not entry.open:
            for other in self._opened(lease.worker):
                raise StaleGeneration(
                    f"lease {lease.id} is of generation {lease.generation} of {lease.worker}, the open one is "
                    f"{other.pool.generation}"
                )
            raise UnknownPool(f"the pool of decode worker {lease.worker} is not open here")
        check_lease(lease, entry.pool, prompt_tokens)

    def _opened(self, worker: str) -> list[Entry]:
        return [entry for (name, _), entry in self._entries.items() if name == worker and entry.open]

    def _end(self, entry: Entry, message: PoolRefused) -> None:
        del self._entries[message.worker, message.generation]
        for session in entry.sessions.values():
            session.send(message)


def check_lease(lease: Lease, pool: PoolDescription, prompt_tokens: int) -> None:
    """Raises InvalidRequest, naming the values, unless `lease` can take a prompt of that length."""
    geometry = pool.geometry
    if lease.prompt_tokens != prompt_tokens:
        raise InvalidRequest(f"lease {lease.id} is for {lease.prompt_tokens} tokens, the prompt has {prompt_tokens}")
    if len(lease.block_ids) * geometry.block_size < prompt_tokens:
        raise InvalidRequest(
            f"lease {lease.id} has {len(lease.block_ids)} blocks of {geometry.block_size} tokens, the prompt has "
            f"{prompt_tokens} tokens"
        )
    if max(lease.block_ids) >= geometry.num_blocks or len(set(lease.block_ids)) != len(lease.block_ids):
        raise InvalidRequest(f"lease {lease.id}: its blocks are not distinct blocks of a pool of {geometry.num_blocks}")
    if lease.resident_tokens % geometry.block_size or lease.resident_tokens > prompt_tokens:
        raise InvalidRequest(
            f"lease {lease.id}: {lease.resident_tokens} resident tokens are no whole blocks of {geometry.block_size} "
            f"within {prompt_tokens} tokens"
        )
    if (lease.staging_offset is None) != (pool.staging is None):
        raise InvalidRequest(f"lease {lease.id}: staging_offset does not go with kv_path {pool.kv_path}")
    if lease.staging_offset is not None and pool.staging is not None:
        end = lease.staging_offset + lease.staging_slots * lease.staging_slot_bytes
        if lease.staging_slots < 1 or end > pool.staging.length:
            raise InvalidRequest(
                f"lease {lease.id}: {lease.staging_slots} slots of {lease.staging_slot_bytes} bytes at "
                f"{lease.staging_offset} are not in a staging region of {pool.staging.length} bytes"
            )
