"""Find out which rank ended a job, and how.

A rank that `ringreduce run` has started reports how it ends.  A killed rank cannot report: the
kernel tells the launcher that its process is gone.  MPI's process manager ends the other ranks a
moment later, so the first end counts.
"""

from __future__ import annotations

import os
import platform
import signal
from dataclasses import dataclass

from ringreduce.supervisor.mpiexec import Flavour
from ringreduce.supervisor.ranks import Gone, Said

_INTELS_CODE = 255
"""The exit code that Intel MPI's mpiexec may return after a killed rank."""
_DEADLY = (
    *(signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL),
    *(signal.SIGSEGV, signal.SIGPIPE, signal.SIGALRM, signal.SIGTERM, signal.SIGXCPU),
    *(signal.SIGXFSZ, signal.SIGSYS),
)
"""Signals that end a rank before it can report."""


@dataclass(frozen=True)
class End:
    """How the first rank ended that ended the job."""

    rank: str
    how: str
    """The report of the rank, such as "raised ValueError"; "": the rank was gone without one."""
    status: int | None = None
    """The status of its process, as for ``os.waitstatus_to_exitcode``; None if not known."""
    code: int = 0
    """The exit code of all ranks if they end in order: mpiexec may kill those that end last."""

    def text(self, returncode: int, flavour: Flavour) -> str:
        """Describe the end, given mpiexec's `returncode`; "" if it is not known."""
        how, number = self.how, self.signal(returncode, flavour)
        if number:
            how = f"was killed by signal {number} ({signal.Signals(number).name})"
        where = f"rank {self.rank} on {platform.node()}"
        return f"{where} {how}; this ended the job" if how else ""

    def signal(self, returncode: int, flavour: Flavour) -> int:
        """Return the number of the signal that killed the rank; 0 if none did.

        After signal n hydra's mpiexec returns n, and others 128 + n, as shells do.  That of Intel
        MPI may return 255, and the status of the process has the signal.  Without a signal hydra's
        may return that of the signal with which it ended other ranks.
        """
        number = returncode if flavour.is_hydra else returncode - 128
        is_killed = self.status is None or os.WIFSIGNALED(self.status)
        if flavour is Flavour.INTEL and returncode == _INTELS_CODE and self.status is not None:
            number = os.WTERMSIG(self.status)
        return number if is_killed and number in _DEADLY and not self.how else 0


def end_of(event: Said | Gone) -> End | None:
    """Return the end of the job that `event` causes; None if the job goes on."""
    rank = event.rank
    if isinstance(event, Gone):
        return None if rank.reported else End(rank.number, "", event.status)
    fields = event.message.fields if event.message.kind == "end" else {}
    how, code = str(fields.get("how", "")), int(fields["code"]) if fields.get("in_order") else 0
    return End(rank.number, how, code=code) if how or code else None
