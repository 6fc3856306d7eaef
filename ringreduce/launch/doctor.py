"""`ringreduce doctor`: print what a bug report needs, one fact a line, with ok or what to repair.

The last line counts the problems.  Works without an MPI.  A check that might crash or hang runs in
a separate process.  `ringreduce doctor --clean` removes the files that killed MPI jobs have left.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ringreduce.console.colours import Colours
from ringreduce.console.sections import wrapped
from ringreduce.errors import counted
from ringreduce.launch.probe import ProbeResult, answer_of, ask, command
from ringreduce.supervisor import socket_folder
from ringreduce.supervisor.cleanup import SHARED_MEMORY, abandoned_files, remove_abandoned_files
from ringreduce.supervisor.launcher import Job, job_environment, prepared
from ringreduce.supervisor.mpiexec import (
    INSTALL,
    LaunchError,
    Mpiexec,
    NoMpiError,
    find_mpiexec,
    identify,
    installed_wheels,
)
from ringreduce.system.addresses import own_addresses
from ringreduce.system.cores import quota, usable
from ringreduce.system.proc import has_nvidia_driver, memory_bytes, ptrace_scope

_SMALL_SHM_BYTES = 64 << 20
_MIB, _GIB = 1 << 20, 1 << 30
_PROBE = "-P", "-m", "ringreduce.launch.probe"

Problem = tuple[str, str]
"""A problem, and the advice about it; both "" if nothing is wrong."""


@dataclass(frozen=True)
class Finding:
    """A fact, and the advice about it; "" if nothing is wrong."""

    name: str
    value: str
    advice: str = ""
    essential: bool = False
    """Whether no job runs until the advice is followed."""

    def line(self, colours: Colours) -> str:
        if not self.advice:
            return f"{colours.good('ok')}   {self.name:<14} {self.value}"
        paint = colours.bad if self.essential else colours.doubtful
        return f"{paint('fix')}  {self.name:<14} {self.value}: {self.advice}"


Check = Callable[[], Iterable[Finding]]


def main() -> int:
    """Print and count all findings; return 1 if no job runs until one is solved, else 0."""
    colours = Colours.of(sys.stdout)
    problems = []
    for check in CHECKS:
        for finding in _findings(check):
            print(wrapped(finding.line(colours), 20), flush=True)
            problems += [finding] * bool(finding.advice)
    essential = any(problem.essential for problem in problems)
    paint = colours.bad if essential else colours.doubtful if problems else colours.good
    print(wrapped(paint(_summary(problems))))
    return int(essential)


def _findings(check: Check) -> Iterable[Finding]:
    """Yield the findings of a check, and its error if it raises one: the other checks go on."""
    try:
        yield from check()
    except Exception as error:
        yield Finding(check.__name__, f"raised {error!r}", "report it, with this page")


def _summary(problems: Sequence[Finding]) -> str:
    if not problems:
        return "no problems"
    count = counted(len(problems), "problem")
    effect = "no job runs" if any(problem.essential for problem in problems) else "jobs still run"
    return f"{count}: {', '.join(problem.name for problem in problems)}; {effect}"


def clean() -> int:
    removed = remove_abandoned_files()
    for path, nbytes in removed.items():
        print(f"removed {path}, {nbytes:,} bytes")
    print(f"removed {_files_text(removed)}" if removed else "nothing to remove")
    return 0


def _files_text(files: Mapping[Path, int]) -> str:
    count = counted(len(files), "file")
    return f"{count}, {sum(files.values()) / _MIB:,.0f} MiB in all"


def this_process() -> Iterable[Finding]:
    version = _distribution("ringreduce", "source tree")
    yield Finding("ringreduce", f"{version}, {Path(__file__).parent}")
    implementation = f"{platform.python_implementation()} {platform.python_version()}"
    yield Finding("Python", f"{implementation}, {sys.executable}")
    system = (platform.system(), platform.release(), platform.machine(), *platform.libc_ver())
    yield Finding("platform", " ".join(system))


def machine() -> Iterable[Finding]:
    limit, bound = quota(), len(os.sched_getaffinity(0))
    limited = f", limited to the time of {limit:g}" if limit < math.inf else ""
    advice = ""
    if limit < bound:
        advice = f"ranks that spin lose their time slices; start at most {usable()}"
    yield Finding("cores", f"{bound} of {os.cpu_count()}{limited}", advice)
    total, available = memory_bytes()
    yield Finding("memory", f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB")


def network() -> Iterable[Finding]:
    """The addresses by which ranks of other hosts reach ranks of this one without MPI."""
    try:
        found = own_addresses(interface=os.environ.get("RINGREDUCE_INTERFACE") or None)
    except ValueError as error:
        yield Finding("addresses", str(error).removeprefix("init: "), "name another interface")
        return
    value = ", ".join(f"{address} ({interface})" for interface, address in found)
    yield Finding("addresses", value or "none; jobs of this host alone need none")


def mpi() -> Iterable[Finding]:
    """The MPI, its mpiexec, whether a job of two ranks has the size 2, and the recovery levels."""
    wheels = installed_wheels()
    if len(wheels) > 1:
        value = " and ".join(wheels)
        yield Finding("MPI wheels", value, f"uninstall all but one: pip uninstall {wheels[-1]}")
    given = job_environment()
    try:
        mpiexec = find_mpiexec(Path(sys.prefix), given.get("PATH", os.defpath))
    except LaunchError as error:
        value, _, advice = str(error).partition(". Do: ")
        none = isinstance(error, NoMpiError)  # jobs of one host run without
        yield Finding("MPI", value, advice or INSTALL, essential=not none)
        return
    yield Finding("mpiexec", str(mpiexec))
    sees = Job(ranks=2, program=(*_PROBE, "mpi"))
    found = [*job_findings(answer_of(*prepared(sees, mpiexec, given)))]
    yield from found
    if any(each.essential and each.advice for each in found):
        yield Finding("levels 1 to 3", "not here: no job of 2 ranks runs", "repair that first")
        return
    shrinks = Job(ranks=2, program=(*_PROBE, "shrink"), goes_on=mpiexec.goes_on)
    answer = answer_of(*prepared(shrinks, mpiexec, given))
    yield from level_findings(answer, _why_not_elastic(), mpiexec)


def job_findings(answer: ProbeResult) -> Iterable[Finding]:
    if not answer.lines:
        advice = f"python -c 'from mpi4py import MPI' must work; {INSTALL}"
        yield Finding("MPI", f"two ranks do not start: {answer.complaint}", advice, essential=True)
        return
    first = answer.lines[0]
    library = identify(first["library"])
    name = " ".join(library) if library else first["library"].splitlines()[0]
    yield Finding("MPI", f"{name}, mpi4py {_distribution('mpi4py')}")
    sizes = sorted(line["size"] for line in answer.lines)
    wrong = f"mpiexec and mpi4py belong to different MPIs; {INSTALL}" if sizes != [2, 2] else ""
    yield Finding("job", f"2 ranks started see sizes {sizes}", wrong, essential=True)
    level = first["thread_level"]
    advice = "" if level == "MULTIPLE" else "asynchronous calls advance only inside wait and done"
    yield Finding("thread level", level, advice)


def level_findings(answer: ProbeResult, problem: Problem, mpiexec: Mpiexec) -> Iterable[Finding]:
    """Yield for each level of recovery what it does; or that it does not hold here, and why not.

    `answer` is that of two probes `shrink`; `problem` is why no job with ``--elastic`` starts.
    """
    why, advice = problem
    reason = why or _why_not_live(answer)
    if not reason:
        yield Finding("level 1", "live: after a loss the other ranks go on in their processes")
    else:
        # Without `goes_on` the launcher takes level 2 by itself.
        other = "add --recovery relaunch to --elastic" if mpiexec.goes_on else ""
        yield Finding("level 1", f"live, not here: {reason}", advice or other)
    if why:
        yield Finding("level 2", f"relaunch, not here: {why}", advice)
        yield Finding("level 3", f"handover, not here: {why}", advice)
        return
    yield Finding("level 2", "relaunch: after a loss a new job goes on after the last update")
    handover = "handover: other ranks, in a new job, take over at a step"
    if not reason:
        handover += "; if ranks only leave, the others go on in their processes"
    yield Finding("level 3", handover)


def _why_not_live(answer: ProbeResult) -> str:
    """Return why ranks cannot go on in their processes after a loss; "" if they can."""
    if not answer.lines:
        return f"no job of 2 ranks runs with fault tolerance: {answer.complaint}"
    for line in answer.lines:
        if line["reason"]:
            return " ".join(line["reason"].split())  # MPICH's name has tabs
    sizes = [line["size"] for line in answer.lines]
    return "" if sizes == [2, 2] else f"the shrunk communicators of 2 ranks have the sizes {sizes}"


def _why_not_elastic() -> Problem:
    """Return why the launcher cannot supervise a job, and the advice; both "" if it can."""
    pid, allow = os.getpid(), "in the container's seccomp"
    try:
        os.close(os.memfd_create("ringreduce"))
    except OSError as error:
        return f"no memory for a State, {error.strerror}", f"allow memfd_create {allow}"
    try:
        os.close(os.pidfd_open(pid))
    except OSError as error:
        advice = f"allow pidfd_open {allow}; it needs Linux 5.3"
        return f"no view of the ranks' processes, {error.strerror}", advice
    try:
        socket_folder.prepare(pid)
        try:
            socket_folder.bound(socket_folder.socket_of(pid)).close()
        finally:
            socket_folder.remove(pid)
    except OSError as error:
        return f"no socket for the ranks, {error}", "set TMPDIR to a folder of your own"
    return "", ""


def shared_memory() -> Iterable[Finding]:
    """The ways in which ranks of one host can access each other's memory."""
    error, works = _read_sibling()
    yield Finding("single copy", works or error, _single_copy_advice(error))
    yield from _shm_directory()
    yield from _memfd()


def _read_sibling() -> tuple[str, str]:
    """Try single copy between two probes.  Returns the problem, and what works."""
    holder = subprocess.Popen(
        command("hold"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    with holder:
        assert holder.stdout is not None
        held = json.loads(holder.stdout.readline() or "{}")
        if not held:
            return "the probe does not start", ""
        where = str(held["pid"]), str(held["address"])
        answer = ask("read", *where)
        if not _read_error(answer):
            return _what_works(answer)
        assert holder.stdin is not None
        holder.stdin.write("allow\n")
        holder.stdin.flush()
        holder.stdout.readline()
        answer = ask("read", *where)
    error, works = _what_works(answer)
    return error, works and f"{works}, as ranks allow it to each other (ptrace_scope 1)"


def _what_works(answer: ProbeResult) -> tuple[str, str]:
    if error := _read_error(answer):
        return error, ""
    if not answer.lines[0].get("writes", True):
        return "no writes", "process_vm_readv works; process_vm_writev is forbidden"
    return "", "process_vm_readv and process_vm_writev work"


def _read_error(answer: ProbeResult) -> str:
    return str(answer.lines[0]["error"]) if answer.lines else answer.complaint


def _single_copy_advice(error: str) -> str:
    if not error:
        return ""
    with contextlib.suppress(OSError, ValueError):
        scope = ptrace_scope()
        if scope > 1:  # with 1 ranks can allow it to each other
            return f"ptrace_scope is {scope}; as root: sysctl kernel.yama.ptrace_scope=0"
    return "seccomp forbids it; in a container: docker run --cap-add=SYS_PTRACE"


def _shm_directory() -> Iterable[Finding]:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        yield Finding(str(SHARED_MEMORY), str(error.strerror), "mount a tmpfs there")
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    advice = ""
    if free < _SMALL_SHM_BYTES:
        advice = "MPIs need more; in a container: docker run --shm-size=1g"
    value = f"{free / _MIB:.0f} MiB free of {size / _MIB:.0f} MiB"
    yield Finding(str(SHARED_MEMORY), value, advice)
    yield from _stale_files()


def _stale_files() -> Iterable[Finding]:
    if stale := abandoned_files():
        value = f"killed MPI jobs have left {_files_text(stale)}"
        yield Finding("stale files", value, "ringreduce doctor --clean")


def _memfd() -> Iterable[Finding]:
    try:
        descriptor = os.memfd_create("ringreduce")
    except OSError as error:
        advice = "shared memory goes through MPI; allow memfd_create in the container's seccomp"
        yield Finding("memfd_create", str(error.strerror), advice)
        return
    with os.fdopen(descriptor, "wb+") as file:
        file.truncate(mmap.PAGESIZE)
        mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
    yield Finding("memfd_create", "works")


def packages() -> Iterable[Finding]:
    """NumPy and the optional packages, each imported in a separate process."""
    yield _package("NumPy", "numpy", "pip install numpy", essential=True)
    yield _package("Numba", "numba", "pip install numba for compiled kernels")
    yield _package("ml_dtypes", "ml_dtypes", "pip install ml_dtypes for bfloat16")
    yield _short_floats()


def _package(name: str, module: str, advice: str, *, essential: bool = False) -> Finding:
    answer = ask("module", module)
    if answer.lines:
        return Finding(name, answer.lines[0]["version"], essential=essential)
    missing = f"No module named {module!r}" in answer.complaint
    value = "not installed" if missing else answer.complaint
    return Finding(name, value, advice, essential=essential)


def _short_floats() -> Finding:
    """Whether compiled loops add 16-bit floats."""
    answer = ask("kernels")
    if not answer.lines:
        return Finding("16-bit floats", answer.complaint, "report it, with this page")
    slow = [name for name, compiled in answer.lines[0].items() if not compiled]
    if not slow:
        return Finding("16-bit floats", "added by compiled loops")
    advice = "pip install numba; float16 also needs a processor that converts it (F16C)"
    return Finding("16-bit floats", f"{' and '.join(slow)} through NumPy, slowly", advice)


def gpu() -> Iterable[Finding]:
    """CuPy and the GPUs that it sees.  Neither is required."""
    answer = ask("gpus")
    driver = has_nvidia_driver()
    if answer.lines:
        found = answer.lines[0]
        yield Finding("CuPy", f"{found['version']}, CUDA {found['cuda']}")
        for index, gpu in enumerate(found["gpus"]):
            memory = f"{gpu['memory_bytes'] / _GIB:.0f} GiB"
            yield Finding(f"GPU {index}", f"{gpu['name']}, {memory}, compute {gpu['compute']}")
    elif "No module named 'cupy'" in answer.complaint:
        advice = "pip install 'ringreduce[gpu]'" if driver else ""
        yield Finding("CuPy", f"not installed, {'a GPU' if driver else 'no GPU'} here", advice)
    else:
        advice = "" if not driver else "CuPy must fit the driver: docs.cupy.dev, Installation"
        yield Finding("CuPy", f"sees no GPU: {answer.complaint}", advice)


CHECKS: tuple[Check, ...] = (*(this_process, machine, network, mpi, shared_memory, packages, gpu),)


def _distribution(name: str, otherwise: str = "of unknown version") -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return otherwise
