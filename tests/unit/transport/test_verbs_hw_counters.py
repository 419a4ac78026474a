"""The NIC's own counters, over made-up /sys trees."""

from __future__ import annotations

from pathlib import Path

from transport.backends.verbs import hw_counters


def tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        file = root / "class/infiniband" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_all_counters_of_the_port_and_the_device_are_read(tmp_path: Path) -> None:
    sys = tree(
        tmp_path,
        {
            "mlx5_0/hw_counters/device_wide": "1\n",
            "mlx5_0/ports/1/counters/port_xmit_data": "20\n",
            "mlx5_0/ports/1/hw_counters/packet_seq_err": "3\n",
            "mlx5_0/ports/2/hw_counters/packet_seq_err": "99\n",
        },
    )
    assert hw_counters.read("mlx5_0", 1, sys) == {"device_wide": 1, "port_xmit_data": 20, "packet_seq_err": 3}


def test_what_is_no_counter_is_left_out(tmp_path: Path) -> None:
    files = {"lifespan": "10\n", "broken": "N/A\n", "out_of_buffer": "4\n"}
    sys = tree(tmp_path, {f"mlx5_0/ports/1/hw_counters/{name}": text for name, text in files.items()})
    assert hw_counters.read("mlx5_0", 1, sys) == {"out_of_buffer": 4}


def test_a_device_that_is_gone_has_no_counters(tmp_path: Path) -> None:
    assert hw_counters.read("mlx5_0", 1, tmp_path) == {}
    assert hw_counters.summary("mlx5_0", 1, tmp_path) == {}


def test_makers_names_become_common_ones(tmp_path: Path) -> None:
    sys = tree(
        tmp_path,
        {
            "mlx5_0/ports/1/hw_counters/local_ack_timeout_err": "2",
            "mlx5_0/ports/1/hw_counters/packet_seq_err": "3",
            "mlx5_0/ports/1/hw_counters/rnr_nak_retry_err": "4",
            "mlx5_0/ports/1/hw_counters/resp_remote_access_errors": "5",
            "rxe0/ports/1/hw_counters/completer_retry_err": "6",
            "rxe0/ports/1/hw_counters/rcvd_rnr_err": "7",
        },
    )
    assert hw_counters.summary("mlx5_0", 1, sys) == {"retries": 5, "receiver_not_ready": 4, "refused_here": 5}
    assert hw_counters.summary("rxe0", 1, sys) == {"retries": 6, "receiver_not_ready": 7}


def test_words_become_bytes(tmp_path: Path) -> None:
    sys = tree(
        tmp_path,
        {"mlx5_0/ports/1/counters/port_xmit_data": "1000", "mlx5_0/ports/1/counters/port_rcv_data": "500"},
    )
    assert hw_counters.summary("mlx5_0", 1, sys) == {"sent_bytes": 4000, "received_bytes": 2000}
