"""The checksum: what was sent and what lies there have equal digests exactly when the bytes are equal."""

from __future__ import annotations

import numpy as np
import xxhash
from geometry_cases import Case, cases, splits
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import checksum
from transport.backends.base import Run
from transport.geometry.plan import plan
from transport.geometry.staging import execute
from transport.kernels import reference


@settings(deadline=None, max_examples=50)
@given(cases(), st.data())
def test_one_flipped_byte_changes_the_digest_of_its_channel_alone(case: Case, data: st.DataObject) -> None:
    start, stop = data.draw(st.sampled_from(data.draw(splits(case.tokens))))
    runs = plan(case.geometry, case.bases, case.dst_blocks, start, stop)
    staging = reference.transform(*case.arguments(start, stop))
    channels = case.poisoned()
    execute(channels, staging, runs)

    def digests() -> tuple[int, ...]:
        return checksum.landed(lambda r, at, n: channels[r][at : at + n], runs, len(channels))

    sent = checksum.sent(staging, runs, len(channels))
    assert digests() == sent
    hit = data.draw(st.sampled_from(runs))
    channels[hit.region][hit.remote_offset + data.draw(st.integers(0, hit.length - 1))] ^= 1
    assert [region for region, (a, b) in enumerate(zip(digests(), sent, strict=True)) if a != b] == [hit.region]


def test_a_digest_is_xxh3_64_of_the_runs_bytes_in_their_order() -> None:
    staging = np.arange(100, dtype=np.uint8)
    runs = [Run(2, 40, 7, 10), Run(0, 0, 0, 5), Run(0, 5, 90, 5), Run(2, 90, 0, 10)]
    data = staging.tobytes()
    assert checksum.sent(staging, runs, 3) == (
        xxhash.xxh3_64_intdigest(data[:10]),
        0,
        xxhash.xxh3_64_intdigest(data[40:50] + data[90:100]),
    )
