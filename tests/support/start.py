"""Start ranks without MPI, as torchrun does: by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    python -m tests.support.start -n 3 script.py args...

If a rank ends with another status than 0, the other ranks get SIGTERM, and SIGKILL 2 s later.  This
process ends with the status of that rank, or with 128 plus the number of the signal that ended it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_GRACE_S = 2.0


def main(argv: Sequence[str]) -> int:
    size, program = int(argv[1]), argv[2:]
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(os.getpid())}
    ranks = [
        subprocess.Popen(program, env={**os.environ, **job, "RANK": str(rank)})
        for rank in range(size)
    ]
    left, status = list(ranks), 0
    while left and not status:
        time.sleep(0.005)
        ended = [rank for rank in left if rank.poll() is not None]
        left = [rank for rank in left if rank not in ended]
        status = next((rank.returncode for rank in ended if rank.returncode), 0)
    for rank in left:
        rank.send_signal(signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    for rank in left:
        try:
            rank.wait(max(end - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
