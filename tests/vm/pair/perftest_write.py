"""perftest's ib_write_bw between two nodes: the wire and the RDMA stacks on both ends, without any of our code."""

from __future__ import annotations

import subprocess
import time

from node import NODE, PEER

COMMAND = ("ib_write_bw", "--ib-dev=rxe0", "--gid-index=1", "--size=65536", "--iters=50", "--tx-depth=16", "-F")
CONNECT_S = 40

if NODE == "A":
    subprocess.run(COMMAND, check=True, timeout=CONNECT_S + 20)
else:
    deadline = time.monotonic() + CONNECT_S  # node A may still boot, and cannot say when ib_write_bw listens
    while (client := subprocess.run([*COMMAND, PEER], timeout=30, check=False)).returncode:
        assert time.monotonic() < deadline, client
        time.sleep(0.5)
