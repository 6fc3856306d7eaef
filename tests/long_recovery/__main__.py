"""The command of the long proofs of recovery: see `tests.long_recovery`."""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from typing import Any

from benchmarks.rows import replace
from tests import long_recovery
from tests.long_recovery import (
    bits,
    handover_points,
    kill_points,
    killed_launchers,
    losses,
    random_kills,
    resizes,
    soak,
    stopped_ranks,
)

NAME = "recovery"
PROOFS = {
    "random": (random_kills.prove, 200),
    "points": (kill_points.prove, 1_000_000),
    "live": (random_kills.prove_live, 500),
    "live-points": (kill_points.prove_live, 1_000_000),
    "stopped": (stopped_ranks.prove, 50),
    "live-stopped": (stopped_ranks.prove_live, 50),
    "losses": (losses.prove, 300),
    "live-losses": (losses.prove_live, 300),
    "handover-points": (handover_points.prove, 1_000_000),
    "live-handover-points": (handover_points.prove_live, 1_000_000),
    "resizes": (resizes.prove, 60),
    "live-resizes": (resizes.prove_live, 60),
    "soak": (soak.prove, 60),
    "bits": (bits.prove, 20),
    "launchers": (killed_launchers.prove, 50),
}
"""Name -> function that makes so many faults and returns a row, and the default number."""


def main() -> int:
    parser = argparse.ArgumentParser(description=long_recovery.__doc__.splitlines()[0])
    parser.add_argument("proof", nargs="?", choices=PROOFS, default="random")
    parser.add_argument("--times", type=int, help="faults to make; runs of bits; minutes of soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write to bench_results/")
    options = parser.parse_args()
    prove, usual = PROOFS[options.proof]
    times = usual if options.times is None else options.times
    try:
        found = prove(random.Random(options.seed), times)
    except (Exception, SystemExit):
        _print_repetition(options.proof, times, options.seed)
        raise
    origin: dict[str, Any] = found.pop("environment")
    origin.pop("ranks")  # jobs have several numbers of ranks
    origin["command"] = f"python -m tests.long_recovery {' '.join(sys.argv[1:])}".strip()
    row = {"benchmark": NAME, "proof": options.proof, **found, "seed": options.seed}
    if options.record:
        replace(NAME, [row | origin], same=("mpi", "proof", "cpu"))
    print(json.dumps(row | origin))
    return 0


def _print_repetition(proof: str, times: int, seed: int) -> None:
    """Print the seed of a proof that has failed, and the command that repeats it."""
    given = [proof, "--times", str(times), "--seed", str(seed)]
    command = shlex.join([sys.executable, "-m", "tests.long_recovery", *given])
    print(f"the proof failed with seed {seed}; to repeat it: {command}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
