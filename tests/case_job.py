"""A persistent MPI job that runs cases: started once, fed by the test process, which draws them."""

from __future__ import annotations

import json
import socket
from typing import IO, Any

from tests.cases import Case
from tests.mpi import MpiJobs


class CaseJob:
    """`ranks` ranks that each wait on a socket of their own, so that idle ranks cost nothing."""

    def __init__(self, jobs: MpiJobs, ranks: int = 5) -> None:
        self.jobs, self.ranks = jobs, ranks
        self._lines: list[IO[str]] = []
        self._start()

    def _start(self) -> None:
        path = str(self.jobs.folder / f"cases{len(self.jobs._started)}")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(self.ranks)
            server.settimeout(60)
            self._job = self.jobs.start("serve_cases", self.ranks, CASE_SOCKET=path)
            files = []
            for _ in range(self.ranks):
                connection, _ = server.accept()
                connection.settimeout(60)
                files.append(connection.makefile("rw"))
        by_rank: dict[int, Any] = {int(file.readline()): file for file in files}
        self._lines = [by_rank[rank] for rank in range(self.ranks)]

    def run(self, case: Case) -> None:
        """Run one case on its ranks.  Raises AssertionError with what the ranks said."""
        taking_part = self._lines[: case.ranks]
        for lines in taking_part:
            lines.write(json.dumps(case.to_json()) + "\n")
            lines.flush()
        answers = [json.loads(lines.readline() or '"the rank is gone"') for lines in taking_part]
        if any(answer != "ok" for answer in answers):
            self.jobs.kill(self._job)
            self._start()
            raise AssertionError(
                "\n".join(f"rank {r}: {a}" for r, a in enumerate(answers) if a != "ok")
            )

    def close(self) -> None:
        for lines in self._lines:
            lines.close()
        done = self.jobs.finish(self._job)
        assert done.returncode == 0, done.output
