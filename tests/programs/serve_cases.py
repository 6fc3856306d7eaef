"""The ranks of a persistent job: each takes cases from its own socket and answers each one."""

import json
import os
import socket
import traceback

from mpi4py import MPI

import ringreduce as rr
from tests.cases import CONFIG, Case, nodes_of, run_case

world = MPI.COMM_WORLD
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ["CASE_SOCKET"])
lines = server.makefile("rw")
lines.write(f"{world.rank}\n")
lines.flush()

comms: dict[tuple[int, str], rr.Communicator] = {}


def communicator(case: Case) -> rr.Communicator:
    """One communicator for each number of ranks and layout, made when first needed."""
    key = (case.ranks, case.layout)
    if key not in comms:
        group = world.Get_group().Incl(range(case.ranks))
        sub = world.Create_group(group, tag=case.ranks)
        nodes = nodes_of(case.layout, case.ranks)
        comms[key] = rr.init(sub, nodes=nodes, timeout_s=20, config=CONFIG)
    return comms[key]


for line in lines:
    case = Case.from_json(json.loads(line))
    try:
        run_case(communicator(case), case)
        answer = "ok"
    except Exception:
        answer = traceback.format_exc()
    lines.write(json.dumps(answer) + "\n")
    lines.flush()
for comm in comms.values():
    comm.close()
