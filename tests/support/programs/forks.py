"""Run NAME.py in a folder NAME, with its output in NAME/printed, in a fork of this interpreter.

python -m tests.support.programs.forks NAME ...
"""

import os
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path

import ringreduce.train  # noqa: F401 - forks have it, and need not import it


def run(file: Path) -> None:
    file.with_suffix("").mkdir()
    os.chdir(file.with_suffix(""))
    os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
    runpy.run_path(str(file), run_name="__main__")


failed = False
for name in sys.argv[1:]:
    fork = get_context("fork").Process(target=run, args=[Path(f"{name}.py").absolute()])
    fork.start()
    fork.join()
    failed |= fork.exitcode != 0
sys.exit(failed)
