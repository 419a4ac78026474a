"""The verbs layer on Soft-RoCE: what a write does, and the defined outcome of everything that can go wrong with it."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest
from verbs_ends import QUICK, Ends, Memory, ends, sh, soft_nic, wait, wait_event

from deploy.bench import posting
from transport.backends.verbs import devices, survey
from transport.backends.verbs.completions import Completions
from transport.backends.verbs.nic import OpenNic
from transport.backends.verbs.queue_pair import Options, QueuePair
from transport.backends.verbs.status import FLUSHED, OK, RECEIVER_NOT_READY, REMOTE_ACCESS, RETRIES_EXCEEDED
from transport.errors import ConfigurationError, Overloaded, PushFailed, WorkerLost

LOCAL_QUEUE_PAIR_ERROR = 2
SIZE = 1 << 20


@pytest.fixture(scope="module")
def nic() -> Iterator[OpenNic]:
    opened = OpenNic(devices.choose()[0])
    yield opened
    opened.close()


@pytest.fixture
def pair(nic: OpenNic) -> Iterator[Ends]:
    with ends(nic, size=SIZE) as connected:
        connected.source[0:SIZE] = random.Random(7).randbytes(SIZE)
        yield connected


# ---- choosing


def test_the_default_is_the_ipv4_mapped_roce_v2_gid() -> None:
    [nic] = devices.choose()
    assert (nic.device, nic.port, nic.gid_type, nic.link_layer) == ("rxe0", 1, "RoCE v2", "ethernet")
    assert nic.ip is not None
    assert nic.gid.startswith("0000:0000:0000:0000:0000:ffff:")


def test_a_gid_can_be_asked_for_by_index() -> None:
    [nic] = devices.choose(["rxe0:1:0"])
    assert (nic.gid_index, nic.ip) == (0, None)
    assert nic.gid.startswith("fe80:")


def test_the_survey_knows_what_choose_would_do() -> None:
    found = survey.survey()
    assert found.problem is None
    assert list(found.chosen) == devices.choose()
    assert [device.dmabuf.supported for device in found.devices] == [False]


# ---- writing


def test_a_write_lands_and_only_where_it_should(pair: Ends) -> None:
    pair.p.post([pair.write(100, 5000, 70_000)], wr_id=7)
    [done] = wait(pair.p_done)
    assert (done.wr_id, done.status, done.qp_num) == (7, OK, pair.p.qp_num)
    expected = bytearray(SIZE)
    expected[70_000:75_000] = pair.source[100:5100]
    assert pair.target[0:SIZE] == expected


def test_a_chain_is_one_post_with_one_completion(pair: Ends) -> None:
    pieces = list(range(32))
    random.Random(1).shuffle(pieces)
    length = SIZE // 32
    pair.p.post([pair.write(i * length, length, to * length) for i, to in enumerate(pieces)], wr_id=1)
    assert [done.status for done in wait(pair.p_done)] == [OK]
    for i, to in enumerate(pieces):
        assert pair.target[to * length : (to + 1) * length] == pair.source[i * length : (i + 1) * length]


def test_a_shorter_chain_after_a_longer_one_writes_nothing_more(pair: Ends) -> None:
    pair.p.post([pair.write(0, 4096, i * 4096) for i in range(8)], wr_id=1)
    wait(pair.p_done)
    pair.target[0:SIZE] = bytes(SIZE)
    pair.p.post([pair.write(0, 4096, SIZE - 4096)], wr_id=2)
    wait(pair.p_done)
    assert pair.target[0 : SIZE - 4096] == bytes(SIZE - 4096)
    assert pair.target[SIZE - 4096 : SIZE] == pair.source[0:4096]


def test_what_is_inline_may_be_overwritten_right_after_the_post(pair: Ends) -> None:
    wanted = pair.source[0:64]
    assert pair.p.max_inline >= 64
    write = pair.write(0, 64, 0)
    # An lkey that does not exist: nothing but the copy in the request can be what arrives.
    pair.p.post([(write[0], 0xDEAD00, *write[2:])], wr_id=1)
    pair.source[0:64] = bytes(64)
    assert [done.status for done in wait(pair.p_done)] == [OK]
    assert pair.target[0:64] == wanted


@pytest.mark.parametrize("immediate", [0, 1, 0x01020304, 0xFFFFFFFF])
def test_an_immediate_arrives_behind_its_writes_in_host_order(pair: Ends, immediate: int) -> None:
    pair.d.post_receives(1)
    pair.p.post([pair.write(0, SIZE, 0)], wr_id=1, immediate=immediate)
    [landed] = wait(pair.d_done)
    assert (landed.ok, landed.received, landed.immediate, landed.qp_num) == (True, True, immediate, pair.d.qp_num)
    assert pair.target[0:SIZE] == pair.source[0:SIZE]
    assert [done.immediate for done in wait(pair.p_done)] == [None]


def test_an_immediate_needs_no_write(pair: Ends) -> None:
    pair.d.post_receives(1)
    pair.p.post([], wr_id=1, immediate=5)
    assert [landed.immediate for landed in wait(pair.d_done)] == [5]


def test_a_write_after_an_immediate_is_a_plain_write_again(pair: Ends) -> None:
    pair.d.post_receives(1)
    pair.p.post([pair.write(0, 64, 0)], wr_id=1, immediate=5)
    wait(pair.p_done)
    pair.p.post([pair.write(0, 4096, 4096)], wr_id=2)
    assert [done.status for done in wait(pair.p_done)] == [OK]
    assert pair.target[4096:8192] == pair.source[0:4096]
    assert [landed.immediate for landed in wait(pair.d_done)] == [5]


def test_unsignalled_posts_complete_with_the_next_signalled_one(pair: Ends) -> None:
    for i in range(10):
        pair.p.post([pair.write(0, 64, i * 64)], wr_id=i, signaled=False)
    assert pair.p.room == pair.p.send_depth - 10
    pair.p.post([pair.write(0, 64, 640)], wr_id=10)
    assert [done.wr_id for done in wait(pair.p_done)] == [10]
    assert pair.p.room == pair.p.send_depth


def test_two_ends_write_at_the_same_time(nic: OpenNic) -> None:
    with ends(nic, size=SIZE) as one, ends(nic, size=SIZE) as other:
        for each, byte in ((one, b"\x11"), (other, b"\x22")):
            each.source[0:SIZE] = byte * SIZE
            each.p.post([each.write(0, SIZE, 0)], wr_id=1)
        for each, byte in ((one, b"\x11"), (other, b"\x22")):
            wait(each.p_done)
            assert each.target[0:SIZE] == byte * SIZE


def test_a_gid_without_ipv4_connects_as_well() -> None:
    opened = OpenNic(devices.choose(["rxe0:1:0"])[0])
    with ends(opened, size=4096) as pair:
        pair.source[0:4096] = b"\x33" * 4096
        pair.p.post([pair.write(0, 4096, 0)], wr_id=1)
        assert [done.status for done in wait(pair.p_done)] == [OK]
        assert pair.target[0:4096] == b"\x33" * 4096
    opened.close()


# ---- limits that are kept here, before a device would fail


def test_more_than_the_send_depth_is_refused_before_it_is_posted(pair: Ends) -> None:
    pair.p.post([pair.write(0, 64, 0)] * 60, wr_id=1, signaled=False)
    with pytest.raises(Overloaded, match=r"60 of 64 requests outstanding \(60 of them unsignalled\), no room for 5"):
        pair.p.post([pair.write(0, 64, 0)] * 5, wr_id=2)
    pair.p.post([pair.write(0, 64, 0)] * 4, wr_id=3)
    assert [done.wr_id for done in wait(pair.p_done)] == [3]


def test_more_than_the_receive_depth_is_refused(pair: Ends) -> None:
    with pytest.raises(Overloaded, match="0 of 4 receives posted, no room for 5"):
        pair.d.post_receives(5)


def test_receives_are_counted_down_as_immediates_come(pair: Ends) -> None:
    pair.d.post_receives(4)
    for i in range(3):
        pair.p.post([], wr_id=i, immediate=i)
    assert [landed.immediate for landed in wait(pair.d_done, 3)] == [0, 1, 2]
    assert pair.d.receives == 1


def test_queue_pairs_cannot_book_more_completions_than_fit(nic: OpenNic) -> None:
    done = Completions(nic, 10)
    first = QueuePair(nic, done, send_depth=6, receive_depth=2)
    with pytest.raises(Overloaded, match="has 2 entries free, 3 are needed"):
        QueuePair(nic, done, send_depth=2, receive_depth=1)
    with pytest.raises(ConfigurationError, match="11 completions can never fit a queue of 10"):
        QueuePair(nic, done, send_depth=10, receive_depth=1)
    first.close()
    done.drain()
    QueuePair(nic, done, send_depth=8, receive_depth=2).close()
    done.close()


def test_a_failed_queue_pair_fills_no_more_than_it_booked(nic: OpenNic) -> None:
    with ends(nic, size=4096, send_depth=48, receive_depth=4) as pair:
        pair.p.post_receives(4)
        refused = (*pair.write(0, 64, 0)[:4], pair.target.region.rkey ^ 0x5500)
        pair.p.post([refused] * 48, wr_id=1, signaled=False)
        statuses = [done.status for done in wait(pair.p_done, 52)]
        assert (statuses[0], set(statuses[1:])) == (REMOTE_ACCESS, {FLUSHED})
        assert pair.p_done.drain() == []


def test_a_completion_queue_larger_than_the_device_has_is_refused(nic: OpenNic) -> None:
    with pytest.raises(ConfigurationError, match=f"1 to {nic.max_cqe} are"):
        Completions(nic, nic.max_cqe + 1)


def test_completions_that_come_while_nobody_waits_are_still_notified(pair: Ends) -> None:
    for i in range(3):
        pair.p.post([pair.write(0, 64, 0)], wr_id=i)
        assert select.select([pair.p_done.fd], [], [], 60)[0]
        assert [done.wr_id for done in pair.p_done.drain()] == [i]
    assert pair.p_done.drain() == []
    assert not select.select([pair.p_done.fd], [], [], 0)[0]


def test_a_queue_pair_that_is_not_connected_takes_no_writes(nic: OpenNic, pair: Ends) -> None:
    done = Completions(nic, 8)
    loose = QueuePair(nic, done, send_depth=4, receive_depth=1)
    assert loose.state == "init"
    with pytest.raises(PushFailed, match="is not connected"):
        loose.post([pair.write(0, 64, 0)], wr_id=1)
    loose.close()
    done.close()


# ---- refused by the peer's NIC


def test_a_wrong_rkey_is_refused_and_ends_the_queue_pair(pair: Ends) -> None:
    good = pair.write(0, 4096, 0)
    pair.p.post([(*good[:4], good[4] ^ 0x5500), good], wr_id=3)
    done = wait(pair.p_done, 2)
    assert [(one.wr_id, one.status, one.immediate) for one in done] == [(3, REMOTE_ACCESS, None), (3, FLUSHED, None)]
    assert pair.target[0:4096] == bytes(4096)
    assert pair.p.state == "err"
    with pytest.raises(PushFailed, match="remote access error: the peer's NIC refused the write"):
        pair.p.post([good], wr_id=4)


@pytest.mark.parametrize("remote", [SIZE - 4095, SIZE, -1])
def test_a_write_past_either_end_of_the_region_is_refused_whole(pair: Ends, remote: int) -> None:
    pair.p.post([pair.write(0, 4096, remote)], wr_id=3)
    assert [done.status for done in wait(pair.p_done)] == [REMOTE_ACCESS]
    assert pair.target[0:SIZE] == bytes(SIZE)


def test_a_region_that_peers_may_not_write_is_refused(pair: Ends, nic: OpenNic) -> None:
    private = Memory(nic, 4096, remote_write=False)
    source = pair.source.region
    pair.p.post([(source.address, source.lkey, 4096, private.address, private.region.rkey)], wr_id=1)
    assert [done.status for done in wait(pair.p_done)] == [REMOTE_ACCESS]
    assert private[0:4096] == bytes(4096)
    private.region.close()


def test_a_closed_registration_is_refused(pair: Ends) -> None:
    write = pair.write(0, 4096, 0)
    pair.target.region.close()
    pair.p.post([write], wr_id=1)
    assert [done.status for done in wait(pair.p_done)] == [REMOTE_ACCESS]
    assert pair.target[0:4096] == bytes(4096)


# ---- fencing


def test_after_a_reset_not_one_byte_lands_and_the_writer_gets_an_error(pair: Ends) -> None:
    pair.d.reset()
    pair.p.post([pair.write(0, SIZE, 0)], wr_id=3, immediate=1)
    assert [done.status for done in wait(pair.p_done, 2)] == [RETRIES_EXCEEDED, FLUSHED]
    assert pair.target[0:SIZE] == bytes(SIZE)
    assert pair.d.state == "reset"


@pytest.mark.parametrize("end", ["reset", "close"])
def test_a_reset_in_the_middle_of_a_push_stops_it_there(nic: OpenNic, end: str) -> None:
    with ends(nic, size=8 * SIZE) as pair:
        pair.source[0 : 8 * SIZE] = b"\xff" * (8 * SIZE)
        pair.p.post([pair.write(0, 8 * SIZE, 0)] * 16, wr_id=3)
        getattr(pair.d, end)()
        # The next owner's bytes: whatever is not zero afterwards came from the writer that was cut off.
        pair.target[0 : 8 * SIZE] = bytes(8 * SIZE)
        statuses = [done.status for done in wait(pair.p_done, 1)]
        assert statuses[0] == RETRIES_EXCEEDED, "the push ended before the reset: make it longer"
        assert pair.target[0 : 8 * SIZE] == bytes(8 * SIZE)


def test_a_nic_resets_a_queue_pair_and_keeps_its_number_until_the_close(
    pair: Ends, nic: OpenNic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nic, "software", False)
    pair.d.reset()
    assert pair.d.state == "reset"
    with pytest.raises(Overloaded, match="has 0 entries free"):
        QueuePair(nic, pair.d_done, send_depth=1, receive_depth=0)
    pair.p.post([pair.write(0, SIZE, 0)], wr_id=3)
    assert [done.status for done in wait(pair.p_done)] == [RETRIES_EXCEEDED]
    assert pair.target[0:SIZE] == bytes(SIZE)
    pair.d.close()
    pair.d_done.drain()
    QueuePair(nic, pair.d_done, send_depth=1, receive_depth=0).close()


def test_a_new_queue_pair_after_a_reset_serves_the_next_lease(pair: Ends, nic: OpenNic) -> None:
    stale = pair.d.qp_num
    pair.d.reset()
    with ends(nic, size=4096) as fresh:
        assert stale not in (fresh.d.qp_num, fresh.p.qp_num)
        pair.p.post([pair.write(0, 4096, 0)], wr_id=1)
        fresh.source[0:4096] = b"\x44" * 4096
        fresh.p.post([fresh.write(0, 4096, 0)], wr_id=2)
        assert [done.status for done in wait(fresh.p_done)] == [OK]
        assert [done.status for done in wait(pair.p_done)] == [RETRIES_EXCEEDED]
        assert fresh.target[0:4096] == b"\x44" * 4096


def test_reset_and_close_are_idempotent_and_leave_nothing_to_post_on(pair: Ends) -> None:
    pair.p.reset()
    pair.p.reset()
    with pytest.raises(PushFailed, match="it was reset"):
        pair.p.post([pair.write(0, 64, 0)], wr_id=1)
    pair.p.close()
    pair.p.close()
    with pytest.raises(PushFailed):
        pair.p.post_receives(1)


# ---- a peer that does not answer


def test_a_dead_peer_is_known_after_the_retries(pair: Ends) -> None:
    pair.d.close()
    pair.p.post([pair.write(0, 64, 0)], wr_id=1)
    [done] = wait(pair.p_done)
    assert done.status == RETRIES_EXCEEDED


def test_a_dead_peer_is_known_with_the_default_options(nic: OpenNic) -> None:
    with ends(nic, size=4096, options=Options()) as pair:
        pair.d.close()
        pair.p.post([pair.write(0, 64, 0)], wr_id=1)
        assert [done.status for done in wait(pair.p_done)] == [RETRIES_EXCEEDED]


def test_an_immediate_without_a_receive_is_refused_after_the_retries(pair: Ends) -> None:
    pair.p.post([pair.write(0, 64, 0)], wr_id=1, immediate=5)
    done = wait(pair.p_done)
    assert [one.status for one in done] == [RECEIVER_NOT_READY]


def test_an_immediate_waits_for_a_receive_that_comes_a_little_later(nic: OpenNic) -> None:
    with ends(nic, size=4096, options=Options(min_rnr_timer=31)) as pair:  # the writer asks again after 0.49 s
        pair.p.post([], wr_id=1, immediate=6)
        pair.d.post_receives(1)
        assert [landed.immediate for landed in wait(pair.d_done)] == [6]


# ---- memory that cannot be registered


def test_a_dmabuf_is_refused_by_soft_roce_with_what_to_do(nic: OpenNic) -> None:
    fd = os.memfd_create("no-dmabuf")
    with pytest.raises(ConfigurationError, match=r"rxe0 or kernel \S+ does not support dma-bufs; use a NIC whose"):
        nic.register_dmabuf(fd, 0, 4096, remote_write=True)
    os.close(fd)


def test_memory_that_is_not_mapped_is_refused(nic: OpenNic) -> None:
    with pytest.raises(ConfigurationError, match="4096 bytes at 0x1000: it is not mapped, or has no pages"):
        nic.register(0x1000, 4096, remote_write=True)


def test_a_memlock_limit_too_low_says_how_to_raise_it() -> None:
    program = """
import ctypes, mmap, os, resource
from transport.backends.verbs.devices import choose
from transport.backends.verbs.nic import OpenNic
chosen = choose()[0]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
os.setgid(65534), os.setuid(65534)  # root is exempt
nic = OpenNic(chosen)
memory = mmap.mmap(-1, 1 << 20)
try:
    nic.register(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20, remote_write=True)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("ConfigurationError rxe0 cannot register 1048576 bytes"), done
    for part in ("limit of locked memory is 0.0625 MiB", "ulimit -l", "LimitMEMLOCK=infinity", "--ulimit memlock=-1"):
        assert part in done.stdout


# ---- the link, the device


def test_a_link_that_goes_down_is_an_event_and_fails_writes_and_comes_back() -> None:
    with soft_nic("rxe7", "hawk7"):
        opened = OpenNic(devices.choose(["rxe7"])[0])
        with ends(opened, size=4096) as pair:
            pair.p.post([pair.write(0, 64, 0)], wr_id=1)
            assert [done.status for done in wait(pair.p_done)] == [OK]
            sh("ip link set hawk7 down")
            wait_event(opened, "port_err")
            assert not opened.port_active
            assert pair.p.state == "rts"  # a queue pair without work does not notice
            pair.p.post([pair.write(0, 64, 0)], wr_id=2)
            # Soft-RoCE has no route any more and says so at once; a NIC sends into the void and gives up by time.
            assert [done.status for done in wait(pair.p_done)] in ([LOCAL_QUEUE_PAIR_ERROR], [RETRIES_EXCEEDED])
            with pytest.raises(ConfigurationError, match="rxe7 port 1 is down"):
                devices.choose(["rxe7"])
            sh("ip link set hawk7 up")
            wait_event(opened, "port_active")
            assert opened.port_active
        with ends(opened, size=4096) as again:
            again.p.post([again.write(0, 64, 0)], wr_id=3)
            assert [done.status for done in wait(again.p_done)] == [OK]
        opened.close()


def test_a_device_that_is_removed_fails_what_is_under_way_and_can_be_closed() -> None:
    with soft_nic("rxe8", "hawk8"):
        opened = OpenNic(devices.choose(["rxe8"])[0])
        with ends(opened, size=4096) as pair:
            removal = subprocess.Popen(["ip", "link", "delete", "hawk8"])  # takes rxe8 along
            # Soft-RoCE loses its addresses; it says nothing of its port, and the removal waits for this process.
            wait_event(opened, "gid_change")
            assert not opened.port_active
            pair.p.post([pair.write(0, 64, 0)], wr_id=1)
            assert [done.status for done in wait(pair.p_done)] in ([LOCAL_QUEUE_PAIR_ERROR], [RETRIES_EXCEEDED])
            with pytest.raises(ConfigurationError, match="rxe8"):
                devices.choose(["rxe8"])
        opened.close()
        assert removal.wait(timeout=60) == 0
        with pytest.raises(ConfigurationError, match="there is no RDMA device 'rxe8'; there are: rxe0"):
            devices.choose(["rxe8"])


# ---- the end


def test_closing_a_nic_closes_all_that_was_opened_on_it() -> None:
    opened = OpenNic(devices.choose()[0])
    memory = Memory(opened, 4096, remote_write=True)
    done = Completions(opened, 16)
    pair = QueuePair(opened, done, send_depth=4, receive_depth=4, options=QUICK)
    opened.close()
    opened.close()
    for closable in (memory.region, done, pair):
        closable.close()
    with pytest.raises(WorkerLost):
        done.drain()
    with pytest.raises(WorkerLost):
        opened.register(memory.address, 4096, remote_write=True)
    with pytest.raises(WorkerLost):
        opened.take_event()
    with pytest.raises(PushFailed):
        pair.post_receives(1)
    assert not opened.port_active


def test_nothing_is_left_open_after_a_close() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with ends(OpenNic(devices.choose()[0]), size=4096) as first:
        first.nic.close()
    before = descriptors()
    for _ in range(3):
        opened = OpenNic(devices.choose()[0])
        with ends(opened, size=4096):
            pass
        opened.close()
    assert descriptors() == before


def test_the_descriptors_never_block(nic: OpenNic, pair: Ends) -> None:
    for fd in (nic.event_fd, pair.p_done.fd):
        with pytest.raises(BlockingIOError) as refused:
            os.read(fd, 1024)
        assert refused.value.errno == errno.EAGAIN
    assert nic.take_event() is None
    assert pair.p_done.drain() == []


# ---- what posting costs


def test_the_cost_of_posting_can_be_measured_in_all_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert posting.main(["--writes", "64", "--repeat", "2", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    for way in ("requests filled anew", "requests made anew", "extended interface"):
        assert measured[f"{way}: filled"] > 0
        assert measured[f"{way}: handed over"] > 0
