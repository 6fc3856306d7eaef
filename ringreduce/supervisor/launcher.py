"""Start mpiexec for a job: its command line, and the environment of the ranks.

The launcher itself loads no MPI.  Each rank runs `ringreduce.launch.rank_main`, which runs the
user's program.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.console.terminal import RELAYED_BY
from ringreduce.errors import counted
from ringreduce.recovery.wire import ADDRESS, ELASTIC, EXPECTED_SIZE, MORE_WORDS, TOKEN
from ringreduce.supervisor.banner import MpiexecWithoutBanner
from ringreduce.supervisor.cleanup import remove_stale_session_directory
from ringreduce.supervisor.mpiexec import Flavour, LaunchError, Mpiexec, NoMpiError, find_mpiexec
from ringreduce.supervisor.signals import heed_again
from ringreduce.system.cores import SHARED_CORES, usable
from ringreduce.system.place import port_of, without
from ringreduce.system.prctl import die_with_parent
from ringreduce.trace.recorder import TRACE

_THREAD_COUNTS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_NUMBA_THREADS = "NUMBA_NUM_THREADS"  # the one variable that does not follow OMP_NUM_THREADS
# Prefixes of the variables that a user sets for the ranks.  Open MPI itself sends its own settings
# to other hosts.
_USERS = ("RINGREDUCE_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_", "NUMBA_")

_RANK = (
    "__import__('sys').flags.safe_path or __import__('sys').path.pop(0)",
    "__import__('sys').exit(__import__('ringreduce.launch.rank_main', fromlist=['main']).main())",
)
"""The code of a rank.

``python -m`` would search the working directory for the modules of Python and of this package.  The
code names no variables: the program runs in the same `__main__`.
"""

_WORD_CHARACTERS = 1 << 15
"""Characters of the program's words, as JSON, that a rank gets as its argument.

The rest is in variables: see `MORE_WORDS`.  An mpiexec would read a ``:`` among arguments.  MPICH's
mpiexec takes neither 1,000 arguments nor one of 64 KiB.  Open MPI's puts all arguments into one
variable, and Linux starts no process with a variable of 128 KiB.
"""

_OF_SEVERAL_HOSTS = (
    "--hosts needs an MPI, which connects the hosts; without one start torchrun once on each host"
)

Hosts = tuple[tuple[str, int], ...]
_WITHOUT_MPI = Mpiexec(Path(sys.executable), Flavour.NONE, "")


@dataclass(frozen=True)
class Job:
    """A job of `ranks` copies of a program.  Raises ValueError for contradicting fields."""

    ranks: int
    program: tuple[str, ...]
    """``("script.py", *args)`` or ``("-m", "module", *args)``; with ``"-P"`` first, the program is
    not searched for in the working directory."""
    hosts: Hosts = ()
    """Host names and the most ranks of each, filled in this order.  Empty: this host alone."""
    nodes: tuple[int, ...] = ()
    """The number of ranks of each node, for `ringreduce.init`.  Empty: `init` finds them out."""
    timeout_s: float | None = None
    """Timeout of the communicators in seconds; None: their default."""
    tag_output: bool = False
    goes_on: bool = False
    """Whether Open MPI lets ranks go on after others are lost."""
    instead_of_gloo: bool = False
    """Whether torch makes groups of ringreduce where the program asks for groups of Gloo."""
    without_mpi: bool = False
    """Whether ranks start without MPI even where an MPI is installed."""
    interrupted: Callable[[], str] | None = field(default=None, compare=False)
    """Returns what to print after Ctrl-C, where no rank lives to print it."""
    trace: Path | None = None
    threads: int | None = None
    """Threads of each rank's BLAS and Numba.  None: as many as there are cores for a rank."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"-n is {self.ranks}; wanted at least 1 rank")
        room = sum(count for _, count in self.hosts)
        if self.hosts and room < self.ranks:
            raise ValueError(
                f"--hosts has room for {counted(room, 'rank')}, -n asks for {self.ranks}"
            )
        if self.nodes and sum(self.nodes) != self.ranks:
            raise ValueError(
                f"--nodes has {counted(sum(self.nodes), 'rank')}, -n asks for {self.ranks}"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"--timeout-s is {self.timeout_s:g}; wanted more than 0 seconds")
        if self.without_mpi and self.hosts:
            raise ValueError(f"--without-mpi: {_OF_SEVERAL_HOSTS}")

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks of the host that gets the most."""
        if not self.hosts:
            return self.ranks
        left, most = self.ranks, 0
        for _, count in self.hosts:
            most = max(most, min(count, left))
            left -= min(count, left)
        return most


def job_environment() -> dict[str, str]:
    """Return the launcher's environment without the place of another job in it."""
    return without(os.environ)


def rank_environment(
    job: Job, mpiexec: Mpiexec, given: Mapping[str, str], cores: int, *, root: bool
) -> dict[str, str]:
    """Return the variables to add to `given`, the user's environment, for mpiexec and the ranks.

    A variable in `given` keeps its value, unless an option of the command line says otherwise.
    Other hosts are assumed to have as many `cores` as this one.
    """
    wanted = _thread_counts(given, job.threads or max(1, cores // job.ranks_per_host))
    crowded = job.ranks_per_host > cores
    if mpiexec.flavour is Flavour.OPEN_MPI:
        wanted |= _open_mpi_settings(mpiexec.version, crowded=crowded, root=root)
        if not job.hosts:
            wanted["OMPI_MCA_btl"] = "^ofi"  # ofi sleeps for a second while it looks for networks
    elif mpiexec.flavour is Flavour.MPICH and crowded:
        wanted["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
    added = {name: value for name, value in wanted.items() if name not in given}
    if given.get(SHARED_CORES) != "0":  # another value is that of an outer job
        added[SHARED_CORES] = str(cores) if crowded and job.ranks_per_host % cores == 0 else ""
    return added | _meeting_place(job, given) | _ringreduce_settings(job)


def _meeting_place(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which ranks of several hosts meet; on one, `place.fill` sets them."""
    if not job.hosts:
        return {}
    (first, _), *_ = job.hosts
    found = {"MASTER_ADDR": first, "MASTER_PORT": str(port_of(str(os.getpid())))}
    return {name: value for name, value in found.items() if name not in given}


def _ringreduce_settings(job: Job) -> dict[str, str]:
    settings = {EXPECTED_SIZE: str(job.ranks), TRACE: str(job.trace or "")}
    if job.timeout_s is not None:
        settings["RINGREDUCE_TIMEOUT_S"] = f"{job.timeout_s:g}"
    if job.nodes:
        settings["RINGREDUCE_NODES"] = ",".join(map(str, job.nodes))
    if job.instead_of_gloo:
        settings["RINGREDUCE_INSTEAD_OF_GLOO"] = "1"
    return settings


def _thread_counts(given: Mapping[str, str], threads: int) -> dict[str, str]:
    """Give each rank `threads` threads.  A user's OMP_NUM_THREADS sets those that follow it."""
    names = () if "OMP_NUM_THREADS" in given else _THREAD_COUNTS
    return dict.fromkeys((*names, _NUMBA_THREADS), str(threads))


def _open_mpi_settings(version: str, *, crowded: bool, root: bool) -> dict[str, str]:
    settings = {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_osc": "^ucx",  # ucx prints a harmless warning for each window
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
    """Return mpiexec's command line.

    `added` names the launcher's own variables: MPICH and Intel MPI send the whole environment
    to other hosts, Open MPI only the variables on its command line.
    """
    if mpiexec.flavour is Flavour.OPEN_MPI:
        options = _open_mpi_options(job, given, added)
    else:
        options = _hydra_options(job, given)
    start = ["-P", "-m", "ringreduce.launch.processes"] * (mpiexec.flavour is Flavour.NONE)
    rank = [sys.executable, "-c", "; ".join(_RANK), _pieces(job)[0]]
    return [str(mpiexec.path), *start, "-n", str(job.ranks), *options, *rank]


def _pieces(job: Job) -> list[str]:
    """Return the program's words as JSON, cut into an argument and the values of variables."""
    words, length = json.dumps(job.program), _WORD_CHARACTERS
    return [words[at : at + length] for at in range(0, len(words), length)]


def _open_mpi_options(job: Job, given: Mapping[str, str], added: Iterable[str]) -> list[str]:
    # Ranks are not bound where each has a core: all threads of a rank would share one, the progress
    # thread too.  Ranks that share cores bind themselves, see `ringreduce.system.cores`.
    options = ["--bind-to", "none"]
    if job.goes_on:
        options += ["--with-ft", "ulfm"]
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


def prepared(
    job: Job,
    mpiexec: Mpiexec,
    given: Mapping[str, str],
    address: str = "",
    token: str = "",
    *,
    elastic: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of mpiexec, and its environment.

    The ranks report to the launcher at `address`; "": to none.  `elastic`: the job goes on
    after losses.
    """
    added = rank_environment(job, mpiexec, given, usable(), root=os.geteuid() == 0)
    # An outer job may have set the same variables.
    added |= {ADDRESS: address, TOKEN: token, ELASTIC: "1" if elastic else "0"}
    added |= {f"{MORE_WORDS}{at}": piece for at, piece in enumerate(_pieces(job)[1:], 1)}
    # The launcher sees the ranks of one host: the banner names those that fail on other hosts.
    relays = mpiexec.flavour.is_hydra and not job.hosts and sys.stdout is not None
    added[RELAYED_BY] = str(os.getpid()) if relays else ""
    return command_line(job, mpiexec, given, added), {**given, **added}


def standard_input() -> int:
    """Return the descriptor of standard input; of an empty file if it is closed."""
    return 0 if sys.stdin is not None else os.open(os.devnull, os.O_RDONLY)


def mpiexec_of(job: Job, given: Mapping[str, str]) -> Mpiexec:
    """Return the mpiexec to start a job with; our own where there is no MPI and none is needed."""
    try:
        if not job.without_mpi:
            return find_mpiexec(Path(sys.prefix), given.get("PATH", os.defpath))
    except NoMpiError as error:
        if job.hosts:
            raise LaunchError(f"{_OF_SEVERAL_HOSTS}. {error}") from None
    return _WITHOUT_MPI


def start_mpiexec(
    argv: list[str], environment: Mapping[str, str], **settings: Any
) -> subprocess.Popen[bytes]:
    """Start mpiexec.  SIGTERM ends it when this process ends.

    After SIGKILL it could neither end ranks on other hosts nor clean up.  Raises LaunchError if
    it does not start.
    """
    launcher = os.getpid()

    def tie() -> None:
        heed_again()
        die_with_parent(signal.SIGTERM, launcher)
        remove_stale_session_directory()

    # preexec_fn is safe here: no other thread runs Python, and the threads of NumPy sleep.
    # SIGPIPE stays ignored, as in any Python process.  It would now and then end Intel MPI's
    # mpiexec when two ranks abort at the same time, and the exit code would be lost.
    try:
        kind = MpiexecWithoutBanner if environment.get(RELAYED_BY) else subprocess.Popen
        return kind(argv, env=environment, preexec_fn=tie, restore_signals=False, **settings)
    except OSError as error:
        long = "; pass the program fewer or shorter arguments" * (error.errno == errno.E2BIG)
        raise LaunchError(f"{argv[0]} does not start: {error.strerror}{long}") from None


def exit_code(returncode: int, ended_by: int) -> int:
    """Return 128 + n after signal n, whatever mpiexec's code is then; else that code."""
    if returncode != 0 and ended_by:
        return 128 + ended_by
    return 128 - returncode if returncode < 0 else returncode
