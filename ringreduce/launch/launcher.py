"""Starting a job: mpiexec's command line, the ranks' environment, signals and the exit code.

The launcher loads no MPI itself.  Each rank runs `ringreduce.launch.rank_main`,
which runs the user's program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ringreduce.launch.cleanup import remove_leftovers, remove_own_session_directory
from ringreduce.launch.job import die_with_parent
from ringreduce.launch.mpiexec import Flavour, Mpiexec, find_mpiexec

_THREAD_COUNTS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_NUMBA_THREADS = "NUMBA_NUM_THREADS"  # alone in not following OMP_NUM_THREADS
# What a user sets for the ranks; Open MPI carries its own settings to other hosts by itself.
_USERS = ("RINGREDUCE_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_", "NUMBA_")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
# MPICH's mpiexec does not clean up on SIGHUP, nor Open MPI's on SIGQUIT.
_PASSED_AS = {signal.SIGHUP: signal.SIGTERM, signal.SIGQUIT: signal.SIGTERM}
_SI_KERNEL = 0x80  # siginfo's code of a signal that the terminal's driver sent

_GRACE_S = 5.0  # for mpiexec to end after a signal that should end it
_FOR_EVER_S = 3600.0

Hosts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Job:
    """What to start: `ranks` copies of a program.

    `program` is ``("script.py", *args)`` or ``("-m", "module", *args)``; `hosts` are host names
    and their ranks, filled in this order (empty: this host); `nodes` are the ranks of each node as
    `ringreduce.init` is to see them; `timeout_s` is the communicator's.  Raises ValueError where
    these contradict each other.
    """

    ranks: int
    program: tuple[str, ...]
    hosts: Hosts = ()
    nodes: tuple[int, ...] = ()
    timeout_s: float | None = None
    tag_output: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"-n is {self.ranks}; wanted at least 1 rank")
        room = sum(count for _, count in self.hosts)
        if self.hosts and room < self.ranks:
            raise ValueError(f"--hosts has room for {room} ranks, -n asks for {self.ranks}")
        if self.nodes and sum(self.nodes) != self.ranks:
            raise ValueError(f"--nodes has {sum(self.nodes)} ranks, -n asks for {self.ranks}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"--timeout-s is {self.timeout_s:g}; wanted more than 0 seconds")

    @property
    def ranks_per_host(self) -> int:
        """The ranks of the fullest host."""
        if not self.hosts:
            return self.ranks
        left, most = self.ranks, 0
        for _, count in self.hosts:
            most = max(most, min(count, left))
            left -= min(count, left)
        return most


def job_environment() -> dict[str, str]:
    """The launcher's own environment: what the user has set, and mpiexec is started with."""
    return dict(os.environ)


def cores() -> int:
    """The cores this process may run on; other hosts are taken to have as many."""
    return len(os.sched_getaffinity(0))


def rank_environment(
    job: Job, mpiexec: Mpiexec, given: Mapping[str, str], cores: int, *, root: bool
) -> dict[str, str]:
    """The variables to add to `given` for mpiexec and the ranks.  What is given stays as it is."""
    wanted = _thread_counts(given, max(1, cores // job.ranks_per_host))
    crowded = job.ranks_per_host > cores
    if mpiexec.flavour is Flavour.OPEN_MPI:
        wanted |= _open_mpi_settings(mpiexec.version, crowded=crowded, root=root)
        if not job.hosts:
            wanted["OMPI_MCA_btl"] = "^ofi"  # it sleeps for a second while it looks for networks
    elif mpiexec.flavour is Flavour.MPICH and crowded:
        wanted["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
    added = {name: value for name, value in wanted.items() if name not in given}
    return added | _ringreduce_settings(job)


def _ringreduce_settings(job: Job) -> dict[str, str]:
    settings = {"RINGREDUCE_EXPECTED_SIZE": str(job.ranks)}
    if job.timeout_s is not None:
        settings["RINGREDUCE_TIMEOUT_S"] = f"{job.timeout_s:g}"
    if job.nodes:
        settings["RINGREDUCE_NODES"] = ",".join(map(str, job.nodes))
    return settings


def _thread_counts(given: Mapping[str, str], threads: int) -> dict[str, str]:
    """One thread a core and no more; a user's OMP_NUM_THREADS speaks for those that follow it."""
    names = () if "OMP_NUM_THREADS" in given else _THREAD_COUNTS
    return dict.fromkeys((*names, _NUMBA_THREADS), str(threads))


def _open_mpi_settings(version: str, *, crowded: bool, root: bool) -> dict[str, str]:
    settings = {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_osc": "^ucx",  # it warns, harmlessly, whenever a window is made
    }
    if version.startswith("4."):
        settings["OMPI_MCA_rmaps_base_oversubscribe"] = "true"
    if crowded:
        settings["OMPI_MCA_mpi_yield_when_idle"] = "true"
    if root:
        settings["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        settings["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return settings


def command_line(
    job: Job, mpiexec: Mpiexec, given: Mapping[str, str], added: Iterable[str]
) -> list[str]:
    """mpiexec's command line.  `given` is the user's environment, `added` the names we add to it.

    MPICH and Intel MPI carry the whole environment to other hosts, Open MPI only what it is told.
    """
    if mpiexec.flavour is Flavour.OPEN_MPI:
        options = _open_mpi_options(job, given, added)
    else:
        options = _hydra_options(job, given)
    start = [str(mpiexec.path), "-n", str(job.ranks), *options]
    return [*start, sys.executable, "-m", "ringreduce.launch.rank_main", *job.program]


def _open_mpi_options(job: Job, given: Mapping[str, str], added: Iterable[str]) -> list[str]:
    # Bound to one core, a rank's threads, the progress thread among them, would share it.
    options = ["--bind-to", "none"]
    if job.hosts:
        options += ["--host", _host_list(job.hosts)]
        users = (name for name in given if name.startswith(_USERS))
        for name in sorted({*added, *users}):
            options += ["-x", name]
    if job.tag_output:
        options.append("--tag-output")
    return options


def _hydra_options(job: Job, given: Mapping[str, str]) -> list[str]:
    options = []
    if job.hosts:
        options += ["-hosts", _host_list(job.hosts)]
        if not {"HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP"} & given.keys():
            options += ["-launcher", "ssh"]
    if job.tag_output:
        options.append("-prepend-rank")
    return options


def _host_list(hosts: Hosts) -> str:
    return ",".join(f"{name}:{count}" for name, count in hosts)


def run(job: Job) -> int:
    """Run the job to its end.  Returns its exit code; 128 + n if it ended by signal n.

    Call it from the main thread: signals that come meanwhile are passed on to mpiexec.  Raises
    LaunchError if no mpiexec belongs to this environment's MPI.
    """
    given = job_environment()
    mpiexec = find_mpiexec(Path(sys.prefix), given.get("PATH", os.defpath))
    added = rank_environment(job, mpiexec, given, cores(), root=os.geteuid() == 0)
    started = time.time()
    pid, code = _run_relaying(command_line(job, mpiexec, given, added), {**given, **added})
    if code != 0 and not job.hosts:
        remove_leftovers(pid, since=started)
    return code


def _run_relaying(argv: list[str], environment: dict[str, str]) -> tuple[int, int]:
    """Run mpiexec, passing on the signals that come.  Returns its process id and the exit code."""
    # Ignored, as some parents leave it, SIGCHLD would take the exit code with it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # What is ignored stays ignored: so `nohup` works.
    heeded = {number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
    waited = heeded | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    ended_by, patience_s = 0, _FOR_EVER_S
    try:
        # Safe here: no other thread runs Python, and those of NumPy sleep.
        tie = partial(_tie_to_launcher, os.getpid(), mask)
        process = subprocess.Popen(argv, env=environment, preexec_fn=tie)
        while process.poll() is None:
            info = signal.sigtimedwait(waited, patience_s)
            if info is None:
                if ended_by:
                    process.kill()  # its ranks go with it
                continue
            came = signal.Signals(info.si_signo)
            if came in _ENDING:
                ended_by, patience_s = came, _GRACE_S
            # What the terminal sends, it sends to mpiexec too.
            if came in heeded and info.si_code != _SI_KERNEL:
                process.send_signal(_PASSED_AS.get(came, came))
        while signal.sigtimedwait(waited, 0):
            pass  # came too late for the job
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return process.pid, _exit_code(process.returncode, ended_by)


def _tie_to_launcher(launcher: int, mask: set[int | signal.Signals]) -> None:
    """In the child, before it becomes mpiexec: it ends, and its ranks with it, if we are killed.

    By SIGTERM: SIGKILL would leave it no time to end ranks on other hosts, or to clean up.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    die_with_parent(signal.SIGTERM, launcher)
    remove_own_session_directory()


def _exit_code(returncode: int, ended_by: int) -> int:
    """mpiexecs differ in what they return after a signal; shells do not: 128 + n."""
    if returncode != 0 and ended_by:
        return 128 + ended_by
    return 128 - returncode if returncode < 0 else returncode
