"""The variables of torchrun, from those of other launchers, and the workers of ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ringreduce as rr
from ringreduce.rendezvous import default
from ringreduce.system import place
from tests.support.mpi import MpiJobs
from tests.support.programs.workers import ENDS

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}


SLURM_WITH_PMI = SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4"}


@pytest.mark.parametrize("launcher", [HYDRA, OPEN_MPI, SLURM, SLURM_WITH_PMI])
def test_each_launcher_is_understood(launcher):
    found = place.of_launcher(launcher)
    port = int(found.pop("MASTER_PORT"))
    assert found.pop("RINGREDUCE_PLACED_BY")
    assert 20000 <= port < 32000
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
    }


@pytest.mark.parametrize(
    "several", [HYDRA | {"MPI_LOCALNRANKS": "2"}, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}]
)
def test_where_rank_0_is_on_another_host_its_address_is_not_guessed(several):
    found = place.of_launcher(several).keys()
    assert found == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "RINGREDUCE_PLACED_BY"}


@pytest.mark.parametrize(
    "alone",
    [
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # of a shell
        {"PMI_RANK": "0", "PMI_SIZE": "1"},  # the same, by Slurm's interface for MPIs
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # of a batch script: srun has no part in it
    ],
)
def test_a_process_that_is_no_rank_gets_nothing(alone):
    variables = dict(alone)
    place.fill(variables)
    assert variables == alone


def test_the_only_rank_of_mpirun_has_a_place():
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    found = place.of_launcher(alone)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "1", "localhost")


def test_what_is_set_is_kept():
    variables = OPEN_MPI | {"MASTER_PORT": "1234", "RANK": "7"}
    place.fill(variables)
    assert (variables["MASTER_PORT"], variables["RANK"]) == ("1234", "7")
    assert variables["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("stale", "left"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "pod"}, {}),
        ({"WORLD_SIZE": "1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}, {}),
        (
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"},
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"},
        ),
        ({"RINGREDUCE_PLACED_BY": "7", "RANK": "3", "MASTER_PORT": "1"}, {}),
    ],
)
def test_the_place_of_another_job_is_left_out(stale, left):
    found = place.without(stale | {"HOME": "/home/me"})
    assert found.pop("HOME") == "/home/me"
    assert found == left


def test_a_job_that_a_rank_starts_has_its_own_variables():
    outer = HYDRA | {"PMI_RANK": "3"}
    place.fill(outer)
    inner = outer | HYDRA | {"RINGREDUCE_PLACED_BY": "1"}  # of another launcher
    place.fill(inner)
    assert (outer["RANK"], inner["RANK"]) == ("3", "1")


@pytest.mark.slow
def test_ranks_under_shells_find_the_same_launcher():
    code = "from ringreduce.system import place; print(place._launcher('PMI_RANK'))"
    direct = [sys.executable, "-c", code]
    shells = ["sh", "-c", f'{sys.executable} -c "{code}"; exit $?']
    found = [
        subprocess.run(
            words, env={**os.environ, "PMI_RANK": str(rank)}, capture_output=True, check=True
        ).stdout
        for rank, words in enumerate((direct, shells))
    ]
    assert [int(text) for text in found] == [os.getpid()] * 2


def test_srun_without_an_mpi_is_a_rendezvous_by_variables():
    assert default(SLURM) == "env://"
    assert default(SLURM | {"PMI_RANK": "1"}) is None


def test_a_process_of_torchrun_is_no_rank_of_the_mpi_that_has_started_torchrun():
    assert place.mpi_rank({"PMI_RANK": "3"}) == 3
    assert place.mpi_rank({"PMI_RANK": "3", "TORCHELASTIC_RUN_ID": "none"}) is None


def meet() -> dict[str, object]:
    """As a rank of an MPI's launcher: meet the others by the variables of torchrun alone."""
    place.fill()
    with rr.init(rendezvous="env://", timeout_s=120) as comm:
        total = int(comm.all_reduce(comm.rank))
        return {"rank": comm.rank, "total": total, "at": os.environ["MASTER_PORT"]}


@pytest.mark.mpi
def test_ranks_of_this_mpi_meet_without_it(tmp_path):
    jobs = MpiJobs(tmp_path)
    found = jobs.run_ok("call", 3, "tests.system.test_place:meet")
    jobs.sweep()
    assert [each["rank"] for each in found] == [0, 1, 2]
    assert {each["total"] for each in found} == {3}
    assert len({each["at"] for each in found}) == 1


# --- worker processes of ranks --------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.mpi
@pytest.mark.parametrize("without_mpi", [False, True], ids=["mpi", "env"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_workers_are_refused_and_ranks_go_on(tmp_path, without_mpi, when):
    jobs = MpiJobs(tmp_path, without_mpi)
    first, second = jobs.run_ok("workers", 2, when)
    jobs.sweep()
    assert len(first["refused"]) == (3 if when == "before" else 4)
    assert all(text.startswith("init: this process is a worker") for text in first["refused"])
    assert first["sums"] == second["sums"] == [2, 2, 2]
    if when == "after":  # ranks that a rank starts, and a job of the worker alone, are allowed
        assert first["own"] == ["2", "1"]
        assert first["codes"] == [[code, code] for code in ENDS]


@pytest.mark.slow
def test_a_worker_of_a_process_that_is_no_rank_may_call_init():
    names = {*place.RANK_VARIABLES, place.TORCHRUN, place.RANK_PROCESS, "RANK", "WORLD_SIZE"}
    script = "import multiprocessing as m; from tests.support.programs.workers import ask\n"
    script += "print(m.get_context('fork').Pool(1).map(ask, [0]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={name: text for name, text in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "rank 0 of 1" in done.stdout, done.stderr
