"""Run a job to its end: start its ranks, watch them, pass signals on, and say how it has ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from ringreduce.console.terminal import print_error
from ringreduce.recovery.wire import bound
from ringreduce.supervisor.cleanup import DYING_S
from ringreduce.supervisor.ends import end_of
from ringreduce.supervisor.generation import Generation
from ringreduce.supervisor.launcher import (
    Job,
    exit_code,
    job_environment,
    mpiexec_of,
    prepared,
    standard_input,
)
from ringreduce.supervisor.membership import Decision, Next
from ringreduce.supervisor.mpiexec import Mpiexec
from ringreduce.supervisor.ranks import Gone, Ranks, Said
from ringreduce.supervisor.signals import ENDING, GRACE_S, PASSED_ON, Signals
from ringreduce.system.place import is_here

# MPICH's mpiexec does not clean up on SIGHUP, nor Open MPI's on SIGQUIT.
_PASSED_AS = {signal.SIGHUP: signal.SIGTERM, signal.SIGQUIT: signal.SIGTERM}


def run(job: Job) -> int:
    """Run the job to its end.  Returns its exit code; 128 + n if signal n ended it or a rank.

    If a rank ends the job, prints which one, and how, unless there are `hosts`.  For the main
    thread: the signals that arrive meanwhile are sent on to mpiexec.  Raises LaunchError if no
    mpiexec belongs to this environment's MPI, or if other hosts need one.
    """
    given = job_environment()
    mpiexec, stdin = mpiexec_of(job, given), standard_input()
    address = f"ringreduce {os.getpid()} {os.urandom(8).hex()}"
    forwards = os.isatty(0) or bool(job.hosts and not is_here(job.hosts[0][0]))
    ranks = Ranks(bound(address), os.urandom(16).hex(), None if forwards else stdin)
    return Supervisor(job, given, mpiexec, address, ranks, forwards=forwards).run()


class Supervisor:
    """Runs a job of one generation: it ends when mpiexec ends, which ends the ranks."""

    def __init__(
        self,
        job: Job,
        given: Mapping[str, str],
        mpiexec: Mpiexec,
        address: str,
        ranks: Ranks,
        *,
        forwards: bool = False,
    ) -> None:
        """`given` is the user's environment; `forwards`: mpiexec reads the standard input."""
        self._job, self._given, self._mpiexec, self._address = job, given, mpiexec, address
        self._ranks, self._forwards = ranks, forwards
        self._waited: list[int] = [ranks.fileno()]
        """Descriptors to wait for, besides those of signals."""
        self._present: Generation
        self._ended_by = 0
        """The signal that had to end the job; 0: there was none."""
        self._stop: Decision | None = None

    def run(self) -> int:
        """Run the job to its end.  Returns the exit code; 128 + n after signal n."""
        with Signals() as signals:
            try:
                self._begin()
                while self._goes_on:
                    self._turn(signals)
                assert self._stop is not None
                self._report(self._stop)  # before the clean-up, which may take a second
                self._clean_up(DYING_S)
            finally:
                self._close()
        return self._stop.code

    # --- what a job that goes on after losses does in another way ---

    def _begin(self) -> None:
        stdin = None if self._forwards else subprocess.DEVNULL
        self._present = Generation(1, self._job.ranks, self._command(self._job), stdin=stdin)

    @property
    def _goes_on(self) -> bool:
        return self._stop is None

    @property
    def _wakes(self) -> Sequence[float | None]:
        return [self._present.kill_at]

    def _handle_signal(self, number: int, *, is_terminals: bool) -> None:
        """Pass a signal on, unless the terminal has sent it to mpiexec as well."""
        if number in ENDING:
            self._ended_by = number
            self._present.expect_end(GRACE_S)
        if number in PASSED_ON and not is_terminals:
            self._present.process.send_signal(_PASSED_AS.get(signal.Signals(number), number))

    def _handle_event(self, event: Said | Gone) -> None:
        present = self._present
        present.bug = present.bug or end_of(event)
        if isinstance(event, Said):
            event.message.close()
            if event.message.kind == "hello":
                present.connect(event.rank)
            elif event.message.kind == "join":  # from `ringreduce.elastic`
                event.rank.connection.send("alone")

    def _handle_mpiexec(self, code: int) -> None:
        """Decide what follows the end of the present generation's mpiexec: the job ends."""
        flavour, bug, ended_by, text = self._mpiexec.flavour, self._present.bug, self._ended_by, ""
        if code > 0 and not ended_by and bug is not None and not self._job.hosts:
            code = bug.code or code
            text, ended_by = bug.text(code, flavour), bug.signal(code, flavour)
        elif ended_by == signal.SIGINT and not flavour.is_hydra and self._job.interrupted:
            text = self._job.interrupted()
        self._stop = Decision(Next.STOP, code=exit_code(code, ended_by), text=text)

    def _handle_time(self, now: float) -> None:
        self._present.tick(now)

    def _report(self, stop: Decision) -> None:
        if stop.text:
            tell(stop.text)

    def _clean_up(self, dying_s: float) -> None:
        """Remove the files of a failed job, whose ranks end within `dying_s`."""
        if self._present.process.returncode != 0 and not self._job.hosts:
            self._present.clean_up(dying_s)

    def _close(self) -> None:
        self._ranks.close()

    # --- what every job does ---

    def _turn(self, signals: Signals) -> None:
        at = min((each for each in self._wakes if each is not None), default=None)
        left = None if at is None else max(0.0, at - time.monotonic())
        select.select([*self._waited, *signals.woken], [], [], left)
        for number, is_terminals in signals.taken():
            self._handle_signal(number, is_terminals=is_terminals)
        self._handle_ranks()
        self._handle_mpiexecs()
        self._handle_time(time.monotonic())

    def _handle_ranks(self) -> None:
        for event in self._ranks.happened():
            self._handle_event(event)

    def _handle_mpiexecs(self) -> None:
        present, code = self._present, self._present.process.poll()
        if code is not None and self._stop is None:
            self._handle_ranks()  # the ends of ranks came before, and tell more than the code
            if present is self._present and self._stop is None:
                self._handle_mpiexec(code)

    def _command(self, job: Job, *, elastic: bool = False) -> tuple[list[str], dict[str, str]]:
        token = self._ranks.token
        return prepared(job, self._mpiexec, self._given, self._address, token, elastic=elastic)


def tell(text: str) -> None:
    print_error(f"ringreduce: {text}")
