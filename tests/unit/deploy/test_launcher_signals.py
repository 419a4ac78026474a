"""How often one must say it: the first signal stops, an echo of it changes nothing, a second one kills."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from deploy.launcher import up


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_stops_and_its_echo_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(up.time, "monotonic", lambda: now)
    stop = up._stop_on_signals()
    assert not stop.is_set()
    signal.raise_signal(signal.SIGTERM)
    assert stop.is_set()
    now += up.ONE_SIGNAL_S / 2
    signal.raise_signal(signal.SIGTERM)
    now += up.ONE_SIGNAL_S
    with pytest.raises(up.Interrupted):
        signal.raise_signal(signal.SIGINT)
