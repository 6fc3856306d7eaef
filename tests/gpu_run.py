"""Run the tests marked gpu, the trainer and the benchmark, on a machine with a GPU.

    python -m tests.gpu_run

With CuPy, pytest, Hypothesis and one MPI in the environment.  The tests run over MPI with 2 and 4
ranks on one GPU, so does the benchmark, which writes bench_results/gpu.jsonl.  Exits with 1 when
anything fails.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.gpus import has_gpu
from tests.support.mpi import ROOT, environment, mpiexec

TESTS = (
    "tests/devices/test_device_contract.py",
    "tests/devices/test_cuda.py",
    "tests/test_docs.py",
)
RANKS = (2, 4)
_MOST_S = 1800


def run(*command: str) -> bool:
    """Run a command in the repository, as a job of the tests would be run; True if it ends well."""
    print("\n$", *command, flush=True)
    done = subprocess.run(command, cwd=ROOT, env=environment(), timeout=_MOST_S, check=False)
    return done.returncode == 0


def main() -> int:
    if not has_gpu():
        print("no GPU here: /dev/nvidia0 is missing", file=sys.stderr)
        return 1
    about = "import cupy; cupy.show_config()"
    passed = [
        run(sys.executable, "-c", about),
        run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", *TESTS),
        run(sys.executable, "-m", "ringreduce", "train", "-n", "2", "--device", "cuda"),
        *(
            run(mpiexec(), "-n", str(ranks), sys.executable, "-m", "benchmarks.gpu")
            for ranks in RANKS
        ),
    ]
    print("\nall well" if all(passed) else f"\n{passed.count(False)} of {len(passed)} failed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
