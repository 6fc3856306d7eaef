"""Workers and servers of a `ParameterStore`, of which some kill themselves: see `main`."""

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time

import numpy as np

import ringreduce as rr
from tests.support.mpi import place, report

RANK, SIZE = place()


def kill() -> None:
    report(RANK, {"killed_at": time.time()})
    os.kill(os.getpid(), signal.SIGKILL)


def main(how: str) -> None:
    """Count numbers by the store that `how` describes in JSON.

    Its `victims` are rank -> moment: a number of seconds, or ["update", n], within that update.
    The statement `then` comes after the store.  A worker sleeps for `idle_s` seconds before.
    """
    options = json.loads(how)
    moment, count = options.pop("victims").get(str(RANK)), options.pop("count")
    then, idle_s = options.pop("then", ""), options.pop("idle_s", 0)
    transport = options.pop("transport", None)
    updates = itertools.count(1)
    timer = threading.Timer(moment, kill)
    timer.daemon = True

    def update(parameters, slots, gradient, staleness, number) -> None:
        half = len(parameters) // 2
        parameters[:half] += gradient[:half] != 0
        if moment == ["update", next(updates)]:
            kill()
        parameters[half:] += gradient[half:] != 0

    params = {"w": np.zeros(count), "v": np.zeros(9)}
    with rr.init(timeout_s=60, transport=transport) as comm:
        with rr.train.ParameterStore(comm, params, update, **options) as store:
            if isinstance(moment, float):
                timer.start()
            if store.is_server:
                begin_s, busy_s = time.perf_counter(), time.process_time()
                store.serve()
                share = (time.process_time() - busy_s) / (time.perf_counter() - begin_s)
                digests = {
                    shard: hashlib.sha256(b"".join(map(bytes, replica._parameters.values())))
                    for shard, replica in store._server.replicas.items()
                }
                replicas = {shard: each.hexdigest() for shard, each in digests.items()}
                found = {"replicas": replicas, "busy": round(share, 3)}
            else:
                time.sleep(idle_s)
                pushes = []
                for number in store.steps(count):
                    store.pull()
                    began = time.time()
                    store.push({"w": np.eye(1, count, number)[0], "v": np.ones(9)})
                    pushes.append((began, time.time()))
                wrong = np.flatnonzero(store.pull()["w"] != 1).tolist()
                found = {"wrong": wrong, "pushes": pushes}
            report(RANK, found | {"lost": store.stats.lost})
        timer.cancel()  # a loss is one of the communicator now, which nobody survives
    exec(then)


if __name__ == "__main__":
    main(*sys.argv[1:])
