"""A launcher without an mpiexec: it watches ranks in a thread, until it is stopped."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path
from types import SimpleNamespace

from ringreduce.recovery.wire import bound
from ringreduce.supervisor.ends import End
from ringreduce.supervisor.launcher import Job
from ringreduce.supervisor.mpiexec import Flavour, Mpiexec
from ringreduce.supervisor.ranks import Ranks
from ringreduce.supervisor.supervisor import Supervisor


class Watch(Supervisor):
    """Watches ranks that connect to its `address` with its `token`."""

    def __init__(self) -> None:
        self.address, self.token = f"ringreduce {os.getpid()} {os.urandom(8).hex()}", "token"
        job, mpiexec = Job(1, ("script.py",)), Mpiexec(Path(), Flavour.MPICH, "")
        super().__init__(job, {}, mpiexec, self.address, Ranks(bound(self.address), self.token))
        self._present = SimpleNamespace(bug=None, connect=lambda rank: None)
        self._stopping = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def first(self) -> End | None:
        """The first end that ended the job."""
        return self._present.bug

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once it has seen all that happened before."""
        os.eventfd_write(self._stopping, 1)
        self._thread.join()
        os.close(self._stopping)
        self._close()

    def _watch(self) -> None:
        waited, stopping = [*self._waited, self._stopping], False
        while not stopping:
            ready, _, _ = select.select(waited, [], [])
            stopping = self._stopping in ready
            self._handle_ranks()
