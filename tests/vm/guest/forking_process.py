"""A process whose forked child closes what it has inherited, before it writes itself; run by the tests of forks."""

from __future__ import annotations

import os
import sys

from verbs_ends import ends, wait

from transport.backends.verbs.devices import choose
from transport.backends.verbs.nic import OpenNic

LENGTH = 4096


def main() -> int:
    nic = OpenNic(choose(())[0])
    with ends(nic) as pair:
        child = os.fork()
        if child == 0:
            return 0  # by way of every `close`; then the interpreter finalises what is left
        _, status = os.waitpid(child, 0)
        if status:
            return 2
        pair.source[0:LENGTH] = b"x" * LENGTH
        pair.p.post([pair.write(0, LENGTH, 0)], wr_id=1)
        [completion] = wait(pair.p_done)
        if not completion.ok or pair.target[0:LENGTH] != b"x" * LENGTH:
            return 3
    nic.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
