"""Ranks whose worker processes call `init` or end in several ways; rank 0 reports what they got.

python workers.py before|after      the workers are started before or after `init` in the rank
"""

import multiprocessing
import os
import subprocess
import sys

import ringreduce as rr
from tests.support.mpi import mpiexec, report

ASK = (
    "import ringreduce as rr\ntry: print(rr.init(timeout_s=120))\nexcept ValueError as e: print(e)"
)
NESTED = "import os, ringreduce as rr; os.write(1, b'%d\\n' % rr.init().all_reduce(1))"
OWN = "import ringreduce as rr; print(rr.init(rendezvous=lambda x: [x], rank=0, size=1).size)"
ENDS = {3: "sys.exit(3)", 5: "raise SystemExit(5)", 1: "1 // 0", 0: "None"}


def ask(_=0):
    try:
        return str(rr.init(timeout_s=120))
    except ValueError as error:
        return str(error)


def said_by(*command):
    return subprocess.run([*command], stdout=subprocess.PIPE, text=True).stdout.split("\n")[0]


def refusals():
    """What workers got that were started in each way."""
    found = []
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found += pool.map(ask, [0])
    return found


def exit_codes():
    """The exit codes of forked children that end in each way."""
    found = {}
    for code, end in ENDS.items():
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            exec(end)
            sys.exit()
        found[code] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found


if __name__ == "__main__":
    refused, own, codes = [], [], {}
    first = any(os.environ.get(name) == "0" for name in ("RANK", "PMI_RANK", "PMIX_RANK"))
    if first and "before" in sys.argv:
        refused = refusals()
    comm = rr.init(timeout_s=60)
    if first and "after" in sys.argv:
        refused = [*refusals(), said_by(sys.executable, "-c", ASK)]
        own = [
            said_by(mpiexec(), "-n", "2", sys.executable, "-c", NESTED),
            said_by(sys.executable, "-c", OWN),
        ]
        codes = exit_codes()
    with rr.init(timeout_s=60) as again, comm.split(0) as part:
        sums = [int(each.all_reduce(1)) for each in (comm, again, part)]
    report(comm.rank, {"refused": refused, "own": own, "codes": list(codes.items()), "sums": sums})
    comm.close()
