"""The service's view of the decode workers' pools: who asked for which, and which are open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transport.errors import InvalidRequest, StaleGeneration, UnknownPool
from transport.messages import ClosePool, Lease, Message, OpenPool, PoolDescription, PoolOpened, PoolRefused
from transport.session.server import Session


@dataclass(slots=True)
class Entry:
    """One generation of one decode worker's pool."""

    pool: PoolDescription
    open: bool = False
    sessions: dict[int, Session] = field(default_factory=dict)


class PoolTable:
    """Forwards openings and closings to the engine (`send`), which is connected; several routers share a pool."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._entries: dict[str, Entry] = {}

    @property
    def open_count(self) -> int:
        return sum(entry.open for entry in self._entries.values())

    def ask(self, session: Session, pool: PoolDescription) -> None:
        """A router wants `pool` open; it is answered at once where it is open already, else by `answer`."""
        entry = self._entries.get(pool.worker)
        if entry is None or entry.pool.generation != pool.generation:
            entry = self._entries[pool.worker] = Entry(pool)
            self._send(OpenPool(pool=pool))
        entry.sessions[session.id] = session
        if entry.open:
            session.send(PoolOpened(worker=pool.worker, generation=pool.generation))

    def answer(self, message: PoolOpened | PoolRefused) -> None:
        """The engine's answer, or its word that an open pool is lost: passed on to all that asked."""
        entry = self._current(message.worker, message.generation)
        if entry is None:
            return
        if isinstance(message, PoolOpened):
            entry.open = True
        else:
            del self._entries[message.worker]
        for session in entry.sessions.values():
            session.send(message)

    def leave(self, session: Session, worker: str, generation: str) -> None:
        """A router is done with a pool; the last one closes it."""
        entry = self._current(worker, generation)
        if entry is None or entry.sessions.pop(session.id, None) is None or entry.sessions:
            return
        del self._entries[worker]
        self._send(ClosePool(worker=worker, generation=generation))

    def leave_all(self, session: Session) -> None:
        for entry in list(self._entries.values()):
            self.leave(session, entry.pool.worker, entry.pool.generation)

    def check(self, lease: Lease, prompt_tokens: int) -> None:
        """Raises UnknownPool, StaleGeneration, or InvalidRequest where the lease does not fit pool or prompt."""
        entry = self._entries.get(lease.worker)
        if entry is None or (entry.pool.generation == lease.generation and not entry.open):
            raise UnknownPool(f"the pool of decode worker {lease.worker} is not open here")
        pool = entry.pool
        if pool.generation != lease.generation:
            raise StaleGeneration(
                f"lease {lease.id} is of generation {lease.generation} of {lease.worker}, the open one is "
                f"{pool.generation}"
            )
        check_lease(lease, pool, prompt_tokens)

    def _current(self, worker: str, generation: str) -> Entry | None:
        entry = self._entries.get(worker)
        return entry if entry is not None and entry.pool.generation == generation else None


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
