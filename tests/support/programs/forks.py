"""Run Python files one after another, each in a folder of its own and a fork of this interpreter.

python -m tests.support.programs.forks NAME ...

runs NAME.py in the folder NAME, and writes what it prints into NAME/printed.
"""

import os
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path

import ringreduce.bootstrap
import ringreduce.train  # noqa: F401 - what most files import is imported once


def run(file: Path) -> None:
    file.with_suffix("").mkdir()
    os.chdir(file.with_suffix(""))
    os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
    runpy.run_path(str(file), run_name="__main__")


if __name__ == "__main__":
    files = [Path(f"{name}.py").absolute() for name in sys.argv[1:]]
    forks = [get_context("fork").Process(target=run, args=[file]) for file in files]
    for fork in forks:
        fork.start()
        fork.join()
    sys.exit(any(fork.exitcode for fork in forks))
