"""What the connector's scheduler side tells its worker side in each engine step."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefill_worker.push.push import BlockRange
from transport.messages import Lease


@dataclass(slots=True)
class PushRange:
    """A block range that is complete once the step has run."""

    request_id: str
    transfer_id: str
    lease: Lease
    blocks: BlockRange


@dataclass(slots=True)
class Step:
    """`rewound` lose their blocks before the step runs; `cancelled` (transfer ids) end unpushed."""

    ranges: list[PushRange] = field(default_factory=list)
    rewound: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
