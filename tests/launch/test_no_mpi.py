"""Where there is no MPI, or none is initialised, `init` and the launcher say what to do."""

from __future__ import annotations

import os
import sys

import pytest

from ringreduce.supervisor.mpiexec import INSTALL
from tests.support.mpi import environment, mpiexec

HIDDEN = "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')\n"
REASONS = {
    "no mpi4py": "No module named 'mpi4py'",
    "no libmpi": "nowhere.so: cannot open shared object file",
}
PROGRAMS = {
    "init": "import ringreduce; ringreduce.init(transport='mpi')",
    "launcher": "from ringreduce.supervisor import mpiexec; mpiexec.library_version()",
}
ERRORS = {
    "init": "ImportError: init: mpi4py finds no MPI in",
    "launcher": "ringreduce.supervisor.mpiexec.NoMpiError: mpi4py finds no MPI in",
}


@pytest.mark.parametrize("missing", REASONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_without_an_mpi_the_error_says_what_to_install(run, tmp_path, missing, program):
    variables = {"MPI4PY_LIBMPI": "nowhere.so"}
    if missing == "no mpi4py":
        (tmp_path / "mpi4py.py").write_text(HIDDEN)
        variables = {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        }
    ended = run(PROGRAMS[program], command=[sys.executable, "-c"], env=os.environ | variables)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(f"{ERRORS[program]} {sys.executable}: ")
    assert REASONS[missing] in said
    assert said.endswith(f". Do: {INSTALL}")


@pytest.mark.mpi
def test_an_mpi_that_is_not_initialised_is_refused(run):
    program = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import ringreduce as rr

def refused():
    try:
        rr.init()
    except RuntimeError as error:
        print(error)

refused()
MPI.Init_thread()
rr.init().close()
MPI.Finalize()
refused()
"""
    ended = run("-n", "1", sys.executable, "-c", program, command=[mpiexec()], env=environment())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "init: MPI is not initialised, because mpi4py.rc.initialize is false; "
        "call MPI.Init_thread() first",
        "init: MPI is finalised; a process cannot initialise it again",
    ]
