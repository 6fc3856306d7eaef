"""A persistent MPI job that runs cases: started once, fed by the test process, which draws them."""

from __future__ import annotations

import json
import os
import select
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from tests.support.mpi import MpiJobs

_ANSWER_S = 300.0
"""How long a batch of cases may take."""
_OTHERS_S = 1.0
"""How long the other ranks have to answer after one has failed."""


class _Case(Protocol):
    def to_json(self) -> Any: ...


class CaseJob:
    """`ranks` ranks that each wait on a socket of their own, so that idle ranks cost nothing."""

    def __init__(self, jobs: MpiJobs, ranks: int = 5, program: str = "serve_cases") -> None:
        self.jobs, self.ranks, self._program = jobs, ranks, program
        self._starts = 0
        self._from: list[TextIO] = []
        self._to: list[TextIO] = []
        self._sent: Sequence[_Case] = ()
        self._start()

    def _start(self) -> None:
        self._starts += 1
        path = str(self.jobs.folder / f"cases{self._starts}")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(self.ranks)
            server.settimeout(60)
            self._job = self.jobs.start(self._program, self.ranks, CASE_SOCKET=path)
            ends = [server.accept()[0] for _ in range(self.ranks)]
        files = [(end.makefile("r"), end.makefile("w")) for end in ends]
        by_rank = {int(lines.readline()): (lines, to) for lines, to in files}
        self._from, self._to = map(list, zip(*map(by_rank.get, range(self.ranks)), strict=True))
        for end in ends:
            end.close()

    def send(self, cases: Sequence[_Case]) -> None:
        """Let the ranks begin with a batch of cases, each of its first ``case.ranks`` ranks."""
        self._sent = cases
        line = json.dumps([case.to_json() for case in cases]) + "\n"
        for to in self._to:
            to.write(line)
            to.flush()

    def receive(self) -> tuple[int, str] | None:
        """Wait until the batch is done: None, or which case failed first and what ranks said.

        A job in which a case failed is replaced by a new one; the cases after it were not run.
        """
        failures = self._failures()
        if not failures:
            return None
        self._restart()
        first = min(index for index, _ in failures.values())
        said = [f"rank {r}: {text}" for r, (i, text) in sorted(failures.items()) if i == first]
        return first, f"{self._sent[first]}\n" + "\n".join(said)

    def run(self, case: _Case) -> None:
        """Run one case on its ranks.  Raises AssertionError with what the ranks said."""
        self.send([case])
        failure = self.receive()
        assert failure is None, failure[1]

    def _failures(self) -> dict[int, tuple[int, str]]:
        """Rank -> (index, text) of those whose batch broke off."""
        failures: dict[int, tuple[int, str]] = {}
        waiting = dict(enumerate(self._from))
        while waiting:
            seconds = _OTHERS_S if failures else _ANSWER_S
            ready, _, _ = select.select(list(waiting.values()), [], [], seconds)
            if not ready:
                late = {rank: (len(self._sent) - 1, "no answer") for rank in waiting}
                return failures or late
            for rank in [rank for rank, file in waiting.items() if file in ready]:
                line = waiting.pop(rank).readline()
                done, error = json.loads(line) if line else (0, "the rank is gone")
                if error is not None:
                    failures[rank] = done, error
        return failures

    def _restart(self) -> None:
        self.jobs.kill(self._job)
        self._disconnect()
        self._start()

    def close(self) -> None:
        """End the job.  Raises AssertionError with its output unless it ends well."""
        self._disconnect()
        done = self.jobs.finish(self._job)
        assert done.returncode == 0, done.output

    def _disconnect(self) -> None:
        for file in (*self._from, *self._to):
            file.close()


def serve(rank: int, run: Callable[[Any], None]) -> None:
    """Take batches of cases on a rank of a job; run those before the first that fails."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["CASE_SOCKET"])
    lines = connection.makefile("rw")
    lines.write(f"{rank}\n")
    lines.flush()
    for line in lines:
        answer: tuple[int, str | None] = 0, None
        for values in json.loads(line):
            try:
                run(values)
            except Exception:
                answer = answer[0], traceback.format_exc()
                break
            answer = answer[0] + 1, None
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
