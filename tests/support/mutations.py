"""Bugs to plant, one at a time: each must be found by the tests.

Old texts are short, and each is found exactly once in its file; a test holds them to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ringreduce

PACKAGE = Path(ringreduce.__file__).parent


@dataclass(frozen=True)
class Mutation:
    """In `file` of the package `old` becomes `new`, which breaks what `breaks` says."""

    name: str
    file: str
    old: str
    new: str
    breaks: str

    def occurrences(self, package: Path = PACKAGE) -> int:
        """How often the old text is found; it can be planted if that is once."""
        return (package / self.file).read_text().count(self.old)


MUTATIONS = [
    # --- the plan ---
    Mutation(
        "shards-longer-at-the-end",
        "planning/plan.py",
        "min(part, longer)",
        "max(0, part + longer - parts)",
        "The last shards get the elements that do not divide, not the first.",
    ),
    Mutation(
        "border-of-chunks-rounded-first",
        "planning/plan.py",
        "(high - low) * share // total",
        "(high - low) // total * share",
        "The last elements of a slice belong to no chunk.",
    ),
    Mutation(
        "fold-own-value-first",
        "planning/slices.py",
        "in sorted(values))",
        "in sorted(values, key=lambda value: value[0] != self.rank))",
        "Contributions are not reduced in rank order.",
    ),
    Mutation(
        "parts-folded-into-the-first",
        "planning/slices.py",
        "_part(self._output(chunk), low, high)",
        "_part(self._output(chunk), 0, high - low)",
        "All segments of a long message are reduced into the place of the first segment.",
    ),
    Mutation(
        "finished-at-every-fold",
        "planning/slices.py",
        "ends = chunk in self.result and self.last_write[chunk] == index",
        "ends = chunk in self.result",
        "A mean is divided again at every hop.",
    ),
    Mutation(
        "complete-sum-that-is-passed-on-not-divided",
        "planning/slices.py",
        "finishes = ends or len(values) == self.size",
        "finishes = ends",
        "A mean that a rank folds whole for the root is not divided.",
    ),
    Mutation(
        "partial-sum-over-own-value",
        "devices/cpu.py",
        "                fold(first, source, total)\n                first = total\n",
        "                fold(first, source, into)\n                first = into\n",
        "The sum of lower ranks is written over this rank's value before that is added.",
    ),
    Mutation(
        "scratch-back-a-step-early",
        "planning/slices.py",
        "self.last_use[chunk] > index or",
        "self.last_use[chunk] > index + 1 or",
        "Scratch is allocated again while the next step still sends from it.",
    ),
    Mutation(
        "allocations-overlap",
        "planning/slices.py",
        "if taken - start >= count:",
        "if taken >= start:",
        "Two values are kept in the same scratch.",
    ),
    Mutation(
        "first-message-too-long",
        "planning/slices.py",
        "nbytes <= INSIDE_BYTES",
        "nbytes <= 2 * INSIDE_BYTES",
        "A first message is longer than the buffer that every receiver has for it.",
    ),
    Mutation(
        "every-message-signed",
        "planning/slices.py",
        "signed.add(peer)",
        "pass",
        "Every message carries the signature, not the first of a pair.",
    ),
    Mutation(
        "received-over-own-value",
        "planning/slices.py",
        "            not reduce\n            and len(spans)",
        "            True\n            and len(spans)",
        "A value to be reduced is received over the value that it is reduced into.",
    ),
    Mutation(
        "received-value-not-passed-on",
        "planning/slices.py",
        "self.location.update(overwritten)",
        "overwritten.clear()",
        "A rank passes its own value on instead of the value that it received.",
    ),
    # --- the executor and what it binds ---
    Mutation(
        "message-from-the-start-of-the-buffer",
        "messages/binding.py",
        "self.bytes[span.buffer][span.start * self.itemsize : span.stop * self.itemsize]",
        "self.bytes[span.buffer][: (span.stop - span.start) * self.itemsize]",
        "Every message moves the first bytes of its buffer.",
    ),
    Mutation(
        "copies-folded-again",
        "planning/slices.py",
        "copies = self.copies.pop(chunk)",
        "copies = self.copies[chunk]",
        "Copies that were reduced once are reduced again with copies received later.",
    ),
    Mutation(
        "stale-copy",
        "planning/slices.py",
        "self.last_use.update(dict.fromkeys((*step.folds, *copies), index))",
        "self.last_use.update(dict.fromkeys(step.folds, index))",
        "The memory of a copy that is still to be reduced is allocated to another message.",
    ),
    Mutation(
        "left-in-the-message",
        "messages/binding.py",
        "step.acts.append(copy_bytes(self._plain(span), operands.pop(span)))",
        "operands.pop(span)",
        "Data received with a signature, and not reduced, stay in the receive buffer.",
    ),
    Mutation(
        "received-before-the-signature-is-known",
        "messages/binding.py",
        "last = after if ",
        "last = step if ",
        "Data of another call may be longer than the buffer that receives them.",
    ),
    Mutation(
        "slices-share-scratch",
        "messages/flows.py",
        "slot = index % task.in_flight",
        "slot = 0",
        "All slices under way reduce in the same scratch.",
    ),
    Mutation(
        "divided-at-every-hop",
        "messages/binding.py",
        "if fold.finishes and self.arithmetic.divide is not None",
        "if self.arithmetic.divide is not None",
        "A mean is divided at every reduction, not only by the owner of a shard.",
    ),
    Mutation(
        "out-not-written-back",
        "messages/executor.py",
        "not shares_memory(self.task.device, flat, target)",
        "shares_memory(self.task.device, flat, target)",
        "An `out` that is not contiguous keeps its old values.",
    ),
    Mutation(
        "last-message-not-waited-for",
        "messages/executor.py",
        "step.tests[tested:]",
        "step.tests[tested:-1]",
        "A step ends while its last message is under way.",
    ),
    Mutation(
        "signature-not-compared",
        "messages/executor.py",
        "if received != header:",
        "if not received:",
        "Ranks that make different calls get no error.",
    ),
    Mutation(
        "completed-calls-not-counted",
        "messages/executor.py",
        "flow.runs += flow.finished",
        "flow.runs = flow.finished",
        "After a disagreement ranks wait for messages that came long before.",
    ),
    # --- the kernels ---
    Mutation(
        "min-without-nan",
        "devices/cpu.py",
        "np.minimum(left, right, out=into)",
        "np.fmin(left, right, out=into)",
        "The minimum loses NaN.",
    ),
    Mutation(
        "max-without-nan",
        "devices/cpu.py",
        "np.maximum(left, right, out=into)",
        "np.fmax(left, right, out=into)",
        "The maximum loses NaN.",
    ),
    Mutation(
        "mean-rounded-twice",
        "devices/cpu.py",
        "np.divide(array, by, array)",
        "np.multiply(array, 1 / by, array)",
        "A mean is rounded twice.",
    ),
    Mutation(
        "flat-in-the-order-of-memory",
        "devices/cpu.py",
        "np.ascontiguousarray(array).reshape(-1)",
        'array.ravel(order="K")',
        "Arrays in Fortran's order are taken element by element in the wrong order.",
    ),
    Mutation(
        "bytes-are-a-copy",
        "devices/cpu.py",
        'memoryview(array.data).cast("B")',
        "memoryview(bytearray(array.tobytes()))",
        "Received data never reach the array.",
    ),
    # --- the algorithms ---
    Mutation(
        "last-hop-overwrites",
        "algorithms/ring.py",
        "reduce=True)",
        "reduce=step < n - 2)",
        "The last hop of a ring overwrites the owner's value.",
    ),
    Mutation(
        "root-is-rank-0",
        "algorithms/ring.py",
        "place = (me - root) % n",
        "place = me",
        "Every broadcast comes from rank 0.",
    ),
    Mutation(
        "one-rail-only",
        "algorithms/hierarchical.py",
        "for shard, rail in enumerate(rails)",
        "for shard, rail in enumerate(rails[:1])",
        "Nodes exchange the first shard and keep the others to themselves.",
    ),
    # --- the transports ---
    Mutation(
        "flows-mixed",
        "transports/thread.py",
        "m.source == self.source and m.flow == self.flow",
        "m.source == self.source",
        "A message of one slice is taken for another's.",
    ),
    Mutation(
        "latest-discarded-first",
        "transports/thread.py",
        "(m for m in box.sends if m.source == peer)",
        "(m for m in reversed(box.sends) if m.source == peer)",
        "Messages of the next call are dropped in place of those of the broken one.",
    ),
    Mutation(
        "received-from-anybody",
        "transports/mpi.py",
        "Recv_init([buffer, MPI.BYTE], peer, flow)",
        "Recv_init([buffer, MPI.BYTE], MPI.ANY_SOURCE, flow)",
        "A message of one rank is taken for another's.",
    ),
    Mutation(
        "received-in-any-flow",
        "transports/mpi.py",
        "Recv_init([buffer, MPI.BYTE], peer, flow)",
        "Recv_init([buffer, MPI.BYTE], peer, MPI.ANY_TAG)",
        "A message of one slice is taken for another's.",
    ),
    Mutation(
        "discarded-from-anybody",
        "transports/mpi.py",
        "Improbe(peer, MPI.ANY_TAG, status)",
        "Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)",
        "A message of one rank is dropped in place of another's.",
    ),
    Mutation(
        "always-taken-back",
        "transports/mpi.py",
        "return status.Is_cancelled()",
        "return True",
        "A rank waits again for a message that arrived while its receive was withdrawn.",
    ),
    Mutation(
        "standard-sends-alone",
        "transports/mpi.py",
        "data.Ssend_init if synchronous_sends",
        "data.Send_init if synchronous_sends",
        "Sends that are to wait for their receives do not.",
    ),
    # --- calls of several plans, and the order of calls ---
    Mutation(
        "later-calls-overtake",
        "calls/queue.py",
        "self.works.append(work)",
        "self.works.insert(1, work)",
        "Asynchronous calls run in another order than they were made in.",
    ),
    Mutation(
        "unseen-errors-forgotten",
        "calls/ending.py",
        "unseen = self._unseen_error()",
        "unseen = None",
        "The error of a Work is lost if the program never waits for it.",
    ),
    Mutation(
        "list-laid-on-itself",
        "calls/runner.py",
        "            at += array.size\n",
        "            at += 0\n",
        "The arrays of a list are laid on top of each other.",
    ),
    Mutation(
        "signature-of-a-list-without-its-layout",
        "calls/cache.py",
        'text = ", ".join(array_text(array) for array in arrays)',
        'text = ", ".join(str(array.dtype) for array in arrays)',
        "Lists of other shapes are taken for the same call.",
    ),
    Mutation(
        "wire-not-signed",
        "calls/cache.py",
        'if value is not None and name != "algorithm"',
        'if value is not None and name not in ("algorithm", "wire")',
        "Ranks that send other dtypes get no error.",
    ),
    Mutation(
        "given-up-but-still-coming",
        "calls/executables.py",
        "while not self.withdraw() and time.monotonic() < end:",
        "while False:",
        "Messages are received into arrays that the caller already uses for something else.",
    ),
    Mutation(
        "taken-back-in-order",
        "messages/executor.py",
        "reversed(step.recvs)",
        "step.recvs",
        "A long message that arrives meanwhile is received into the next, shorter buffer.",
    ),
    Mutation(
        "persistent-call-on-a-copy",
        "messages/executor.py",
        "self._keep_only((flat[0], ",
        "self._keep_only((flat[0].copy(), ",
        "A planned call reads the values that its input had when it was planned.",
    ),
    # --- memory that ranks share ---
    Mutation(
        "exposed-after-the-call",
        "planning/shm_instructions.py",
        "if index + 1 == self.rounds or not self.stays_unchanged(rank, index):",
        "if not self.stays_unchanged(rank, index):",
        "Peers read an array after the call, when it is the caller's again.",
    ),
    Mutation(
        "written-while-a-step-behind",
        "planning/shm_instructions.py",
        "used = [m.span for m in (*before.recvs, *now.sends)]",
        "used = [m.span for m in now.sends]",
        "A result is written to where its owner still receives something else.",
    ),
    Mutation(
        "written-before-it-is-read",
        "planning/shm_instructions.py",
        "if self._waited_for[peer] < number:",
        "if self._waited_for[peer] < number - 1:",
        "A rank overwrites exposed memory that its peers have not read yet.",
    ),
    Mutation(
        "third-slice-counted-as-the-second",
        "planning/instructions.py",
        "rounds += sum(each.rounds)",
        "rounds = sum(each.rounds)",
        "The rounds of a third slice have the numbers of the second slice's.",
    ),
    Mutation(
        "time-of-readers-not-counted",
        "shm/stores.py",
        "other_ns += report.other_ns",
        "other_ns += own.other_ns",
        "Ranks choose different kinds of stores, and a writer that does not read loses no time.",
    ),
    Mutation(
        "slot-freed-too-early",
        "shm/protocol.py",
        "previous = sequence - 1",
        "previous = sequence - 2",
        "A slot is written while a peer may still read it.",
    ),
    Mutation(
        "any-header-is-right",
        "shm/protocol.py",
        "return (difference | (a.call_number ^ b.call_number)) == 0",
        "return (difference | (a.call_number ^ b.call_number)) | 1 != 0",
        "Ranks that make different calls add data of different calls.",
    ),
    Mutation(
        "halves-rounded-up",
        "devices/vectors.py",
        "-(upper & 1)",
        "-1",
        "A sum of bfloat16 that is halfway is always rounded up.",
    ),
    Mutation(
        "rest-not-folded",
        "devices/folds.py",
        "if whole < nbytes:",
        "if 0 < whole < nbytes:",
        "Arrays shorter than 64 bytes are not reduced.",
    ),
    Mutation(
        "every-piece-to-the-first",
        "shm/executor.py",
        "into = peer.output.address + direct.offset + begin",
        "into = peer.output.address + direct.offset",
        "All pieces of a result are written to the beginning of a peer's array.",
    ),
    Mutation(
        "looked-before-the-mark",
        "shm/executor.py",
        """            if written == 0:
                write_begins(team)
            written += 1
            into = peer.output.address + direct.offset + begin
            if has_left(peer) or""",
        """            gone = has_left(peer)
            if written == 0:
                write_begins(team)
            written += 1
            into = peer.output.address + direct.offset + begin
            if gone or""",
        "A peer leaves between the look and the mark, and its array is written afterwards.",
    ),
    Mutation(
        "no-fence-behind-the-mark",
        "shm/protocol.py",
        """"writes", 1)
    fence()
""",
        """"writes", 1)
""",
        "The look at the departure of a peer overtakes the mark, which the peer does not see.",
    ),
    Mutation(
        "announced-behind-the-look-at-marks",
        "shm/protocol.py",
        """    store_release(departure_of(team.segment), "has_left", 1)
    fence()
    end = nanoseconds(address_of(team.clock)) + _LEAVING_NS
    for index in range(team.peer_count):
        mark = mark_of(peer_of(team, index).segment)
        while load_acquire(mark, "writes") and nanoseconds(address_of(team.clock)) < end:
            yield_core()
""",
        """    end = nanoseconds(address_of(team.clock)) + _LEAVING_NS
    for index in range(team.peer_count):
        mark = mark_of(peer_of(team, index).segment)
        while load_acquire(mark, "writes") and nanoseconds(address_of(team.clock)) < end:
            yield_core()
    store_release(departure_of(team.segment), "has_left", 1)
    fence()
""",
        "A rank looks at the marks of its peers first, and announces that it leaves afterwards.",
    ),
    Mutation(
        "written-after-the-call-broke-off",
        "shm/protocol.py",
        '"has_left") != 0',
        '"has_left") > 1',
        "A late rank writes to the array of a peer that has left the call.",
    ),
    Mutation(
        "reduced-again-after-a-pause",
        "shm/executor.py",
        "program.done_bytes = ~begin",
        "program.done_bytes = begin",
        "A part that could not be written to a peer is reduced again, with its own result.",
    ),
    Mutation(
        "written-before-headers-are-compared",
        "planning/shm_instructions.py",
        "                    yield self._free_slot(step.index + 1)\n",
        "                    pass\n",
        "A result is written to a peer that may be in another call.",
    ),
    Mutation(
        "last-round-dropped-at-an-empty-message",
        "planning/shm_instructions.py",
        "for m in steps[last].sends\n",
        "for m in steps[last].sends if m.span.start < m.span.stop\n",
        "Ranks wait for a round that nobody posts if a message is empty.",
    ),
    Mutation(
        "share-copied-by-both",
        "planning/shm_instructions.py",
        "begin = pushed_bytes(table.nbytes(sent), table.pushed) if table.pushed else 0",
        "begin = 0",
        "The receiver reads the share of a message that its sender writes, too.",
    ),
    Mutation(
        "left-while-a-peer-writes",
        "planning/shm_instructions.py",
        "yield from self._await(peer, rounds + 1)",
        "yield from self._await(peer, rounds)",
        "A rank leaves a call while a peer still writes its share of a message.",
    ),
    Mutation(
        "every-other-pushed-piece-left-out",
        "shm/executor.py",
        "begin += length\n    program.done_bytes = 0",
        "begin += 2 * length\n    program.done_bytes = 0",
        "Every other piece of a share that is written to a peer is left out.",
    ),
    Mutation(
        "written-and-read-too",
        "planning/shm_instructions.py",
        "elif not table.is_written(peer, step.index, sent, rank):",
        "else:",
        "A rank reads a result that was written to it, perhaps after its peer has left the call.",
    ),
    Mutation(
        "every-other-piece-left-out",
        "shm/executor.py",
        "        begin += length\n    if distributes:",
        "        begin += length << wanted.writes_private\n    if distributes:",
        "Every other piece of a result that is written to private arrays is left out.",
    ),
    Mutation(
        "staged-though-exposed",
        "shm/protocol.py",
        "data = Buffer(exposed.buffer).address + exposed.offset",
        "data = team.slot.address",
        "Peers read an empty slot in place of the memory that a rank exposes.",
    ),
    Mutation(
        "fast-call-not-counted",
        "shm/entry.py",
        "path.next_number = path.next_number + 1",
        "path.next_number = path.next_number",
        "Two calls of the fast path have the same number.",
    ),
    Mutation(
        "two-fast-calls-at-once",
        "shm/entry.py",
        "path.enabled != 0 and path.busy == 0",
        "path.enabled != 0",
        "Two threads of a rank run the same program at once.",
    ),
    Mutation(
        "overlap-not-seen",
        "shm/entry.py",
        "return behind or before",
        "return behind or before or x.data < out.data",
        "A result overwrites parts of the input that are still to be read.",
    ),
    Mutation(
        "lists-that-mix",
        "shm/intervals.py",
        "if each.begin < end:",
        "if each.begin < 0:",
        "A list's results overwrite arrays that are still to be read.",
    ),
    Mutation(
        "intervals-half-sorted",
        "shm/intervals.py",
        "while merge(here, there, count) > 1:",
        "while merge(here, there, count) > 2:",
        "Two arrays of a long, unsorted list overlap, and no call notices it.",
    ),
    Mutation(
        "on-from-the-wrong-piece",
        "shm/iovec.py",
        "if offset < begin:",
        "if offset < 0:",
        "Bytes before the piece that was used last are read from behind that piece.",
    ),
    Mutation(
        "few-bytes-not-dealt-out",
        "shm/iovec.py",
        "move(buffer, offset, nbytes, memory, False)",
        "move(buffer, offset, 0, memory, False)",
        "Results of small arrays of a list stay in the gather buffer.",
    ),
    Mutation(
        "allocated-twice",
        "shm/allocator.py",
        "left = (start + nbytes, stop)",
        "left = (start + nbytes // 2, stop)",
        "Two registered arrays share memory.",
    ),
    # --- shared arrays ---
    Mutation(
        "changed-before-the-lock-says-so",
        "shm/block_access.py",
        "committing(access.rank, access.rank)",
        "held(access.rank)",
        "A block is torn when a rank is killed while it copies its result.",
    ),
    Mutation(
        "taken-over-in-its-own-name",
        "shm/block_access.py",
        "mine = committing(access.rank, source)",
        "mine = committing(access.rank, access.rank)",
        "A second death leaves the wrong result in a block.",
    ),
    Mutation(
        "dead-until-reaped",
        "system/proc.py",
        '_ENDED = (b"Z", b"X")',
        '_ENDED = (b"X",)',
        "A killed rank keeps its locks until its launcher reaps it.",
    ),
    Mutation(
        "lock-kept-after-an-exception",
        "shm/block_access.py",
        "if access.holds:",
        "if access.holds > 1:",
        "A lock is never released after an exception in an add.",
    ),
    Mutation(
        "process-told-by-its-number",
        "shm/blocks.py",
        "if start_of(process.number) != process.start:",
        "if start_of(process.number) is None:",
        "A later process with the same number keeps the locks of a dead rank.",
    ),
    # --- algorithms ---
    Mutation(
        "doubling-with-itself",
        "algorithms/doubling.py",
        "ranks[place ^ distance]",
        "ranks[(place + distance) % len(ranks)]",
        "Partners do not choose each other.",
    ),
    Mutation(
        "tree-without-sums",
        "algorithms/tree.py",
        "recvs=tuple(Recv(child, whole, reduce=True) for child in edge.child)",
        "recvs=tuple(Recv(child, whole) for child in edge.child)",
        "A child's data replace its parent's data.",
    ),
    # --- uneven batches ---
    Mutation(
        "loop-ends-with-the-first-rank",
        "parallel/reducer.py",
        "return bool(self.work.wait()[1])",
        "return self.has_batch",
        "A rank without batches leaves the loop of join while others have batches.",
    ),
    Mutation(
        "weights-of-averages",
        "parallel/data_parallel.py",
        "array.astype(dtype) * weight if",
        "array.astype(dtype) if",
        "An average counts the arrays of all ranks alike, and divides by the samples of all.",
    ),
    Mutation(
        "bound-off-by-one",
        "parallel/store_rule.py",
        "ahead <= self._bound:",
        "ahead <= self._bound + 1:",
        "A worker of a parameter store is one push further ahead than the bound allows.",
    ),
    Mutation(
        "late-push-told-as-an-update",
        "parallel/store_server.py",
        "self._tell(HeadKind.DROP, [decision.worker])",
        "self._tell(HeadKind.APPLY, [decision.worker])",
        "The deciding server tells the servers to apply a gradient that is too late for its step.",
    ),
    Mutation(
        "chain-without-its-middle",
        "parallel/store_replica.py",
        "return behind[0] if behind else None",
        "return behind[-1] if behind else None",
        "The head of a chain passes pushes on to the tail, and the server between has none.",
    ),
    Mutation(
        "push-sent-again-counts-twice",
        "parallel/store_replica.py",
        "return id <= self._last.get(worker, 0)",
        "return id < self._last.get(worker, 0)",
        "A push that a worker sends again after a loss counts twice.",
    ),
    Mutation(
        "smallest-variables-placed-first",
        "parallel/store_messages.py",
        "key=lambda name: -sizes[name]",
        "key=lambda name: sizes[name]",
        "The smallest variables are placed first, so one server has far more numbers than others.",
    ),
    Mutation(
        "idle-column-with-servers",
        "train/compare/__main__.py",
        "sum(idle[:workers]) / workers",
        "sum(idle) / len(idle)",
        "The idle time of a parameter server's workers is divided by the servers, too.",
    ),
    # --- sharded state ---
    Mutation(
        "rows-as-long-as-the-first-shard",
        "parallel/buckets.py",
        "self.width = max(lengths)",
        "self.width = lengths[0]",
        "The last numbers of a longer shard are lost.",
    ),
    Mutation(
        "dropped-layer-used-again",
        "parallel/buckets.py",
        "self._lent_flat, self.parameters = None, {}",
        "self.parameters = {}",
        "A layer that was dropped is not gathered again.",
    ),
    Mutation(
        "next-layer-not-fetched",
        "parallel/sharded_parallel.py",
        "if index + 1 < len(layers):",
        "if index + 1 < 0:",
        "A layer is gathered when it is needed, not while the layer before is computed.",
    ),
    # --- tensor parallelism ---
    Mutation(
        "columns-that-do-not-divide-lost",
        "train/tensor_parallel.py",
        "found[axis] = part(shape[axis], rank, ranks)",
        "found[axis] = slice(shape[axis] // ranks * rank, shape[axis] // ranks * (rank + 1))",
        "No rank holds the columns and rows that the ranks do not divide.",
    ),
    Mutation(
        "whole-arrays-counted-by-every-rank",
        "train/tensor_parallel.py",
        "is not None or rank == 0]",
        "is not None or rank >= 0]",
        "The norm of the gradients counts an array once for every rank that holds it.",
    ),
    # --- pipelines ---
    Mutation(
        "input-gradients-not-sent",
        "pipeline/lowering.py",
        'if action.kind in "BI" and action.stage > 0:',
        'if action.kind == "B" and action.stage > 0:',
        "The gradient of an input that is computed alone is not sent to the stage before.",
    ),
    Mutation(
        "posted-at-its-own-step",
        "parallel/stage_messages.py",
        "self._post(number + self._ahead)",
        "self._post(number)",
        "A receive is posted when its action waits for it, so the message arrives late.",
    ),
    Mutation(
        "stages-as-long-as-the-longest",
        "parallel/stages.py",
        "sum(cut[: stage + 1])",
        "sum(cut[:stage]) + max(cut)",
        "The first layers of a stage are computed twice: the stage before computes them, too.",
    ),
    Mutation(
        "computed-where-others-are-added",
        "parallel/stages.py",
        "places: dict[str, Array] = {}",
        "places = dict(self._gradients.places(microbatch))",
        "The gradient of a microbatch overwrites that of an earlier one, which is not added yet.",
    ),
    # --- 16-bit floats ---
    Mutation(
        "bfloat16-cut-off",
        "devices/float16_elements.py",
        "_HALFWAY, _16, _ONE = _U32(0x8000)",
        "_HALFWAY, _16, _ONE = _U32(0)",
        "bfloat16 is cut off and not rounded.",
    ),
    # --- who belongs to a job, and the supervisor ---
    Mutation(
        "losses-never-forgotten",
        "supervisor/membership.py",
        "now - self._failures[0] > _HOUR_S",
        "now - self._failures[-1] > _HOUR_S",
        "Losses of more than an hour ago count, so a long job ends.",
    ),
    Mutation(
        "first-ranks-leave",
        "supervisor/membership.py",
        "*(others[size:] if size else ())",
        "*(others[: len(others) - size] if size else ())",
        "If fewer ranks are wanted, the first ones leave, and not the last ones.",
    ),
    Mutation(
        "fewest-ranks-are-too-few",
        "supervisor/membership.py",
        "if self.left >= self.rules.least:",
        "if self.left > self.rules.least:",
        "A job that has just as many ranks left as MIN allows waits for more, and ends.",
    ),
    Mutation(
        "short-grace-cuts-the-step",
        "supervisor/membership.py",
        "max(grace_s - _SAVING_S, grace_s / 2)",
        "max(grace_s - _SAVING_S, 0.0)",
        "A job with a grace of 5 s is ended in the middle of its step.",
    ),
    Mutation(
        "told-to-leave-and-lost",
        "supervisor/generation.py",
        "if now >= until}",
        "if now <= until}",
        "A rank that is told to leave is killed at once, in the middle of its step.",
    ),
    Mutation(
        "ranks-that-report-are-blamed",
        "supervisor/generation.py",
        "if e.stopped)) - alive",
        "if e.stopped))",
        "A rank that waits for a stopped one is killed with it.",
    ),
    Mutation(
        "next-wait-ends-with-the-last",
        "supervisor/generation.py",
        "            self.asking.pop(rank, None)\n"
        "        if not self.asking:\n            self.asked_until = None\n",
        "            self.asking.pop(rank, None)\n",
        "Ranks are given up too early when they wait for each other a second time.",
    ),
    Mutation(
        "size-stays-after-a-loss",
        "supervisor/generation.py",
        "        self.size = len(self.ranks)\n",
        "",
        "After a live recovery the launcher still counts the lost rank, and waits for it.",
    ),
    Mutation(
        "status-for-exit-code",
        "supervisor/elastic.py",
        "os.WEXITSTATUS(event.status)",
        "event.status",
        "A job whose rank ends with exit code 3 ends with 0.",
    ),
    Mutation(
        "slow-rank-that-is-needed-leaves",
        "supervisor/elastic.py",
        "or staying > self._rules.least",
        "or staying >= self._rules.least",
        "A slow rank leaves though too few ranks stay, and the job ends.",
    ),
    # --- messages between two ranks ---
    Mutation(
        "named-receives-first",
        "point_to_point/endpoint.py",
        "earliest = min(receives, key=lambda each: each.place)",
        "earliest = receives[0]",
        "A later receive that names the sender takes the message of a receive from any rank.",
    ),
    Mutation(
        "received-into-what-is-sent",
        "point_to_point/endpoint.py",
        "if (operation.sends and other.sends) or not",
        "if operation.sends or other.sends or not",
        "An array is received into while it is sent.",
    ),
    Mutation(
        "waiting-message-overtaken",
        "point_to_point/endpoint.py",
        "waits = pair.error is not None or any(pair.arrivals.values())",
        "waits = pair.error is not None",
        "A receive takes a message past an earlier one of its tag that has waited.",
    ),
    Mutation(
        "given-up-but-still-offered",
        "point_to_point/endpoint.py",
        "self.road.give_up(operation.peer)",
        "pass",
        "The peer takes a message whose send has failed, and whose array is used again.",
    ),
    Mutation(
        "taken-though-never-received",
        "point_to_point/endpoint.py",
        "arrivals.popleft(), REFUSED, None)",
        "arrivals.popleft(), TAKEN, None)",
        "A send succeeds though its peer closes the communicator without a receive.",
    ),
    Mutation(
        "reason-lost-on-the-way",
        "point_to_point/by_transport.py",
        "_replace(state=state, reason=reason)",
        "_replace(state=state)",
        "The error of a message with a rank that has left does not say why it left.",
    ),
    Mutation(
        "answer-without-a-place-lost",
        "point_to_point/by_mailbox.py",
        "                return\n            unsent.popleft()",
        "                pass\n            unsent.popleft()",
        "Sends wait until their timeout, though the receiver has received them all.",
    ),
    Mutation(
        "waiting-message-overwritten",
        "point_to_point/by_mailbox.py",
        "mailbox.DATA_OFFSET + eager).copy()",
        "mailbox.DATA_OFFSET + eager)",
        "A message that waits for its receive is overwritten by a later one.",
    ),
    Mutation(
        "long-shapes-taken-for-one",
        "point_to_point/road.py",
        "blake2b(text.encode(), digest_size=16)",
        "blake2b(text[:_TEXT_LENGTH].encode(), digest_size=16)",
        "An array is received in another shape, if both shapes are long and begin alike.",
    ),
    Mutation(
        "unread-answer-overwritten",
        "shm/mailbox.py",
        'load_acquire(Counts(channel.theirs), "answers") >= ANSWERS',
        'load_acquire(Counts(channel.theirs), "answers") > ANSWERS',
        "An answer overwrites one that the peer has not read, and a send never ends.",
    ),
    # --- the rest ---
    Mutation(
        "stopped-rank-blames-others",
        "transports/yielding.py",
        "self._absent_s += now - self._polled_at - _GAP_COUNTS_S",
        "pass",
        "A job that was stopped for longer than the timeout ends with an error when it goes on.",
    ),
    Mutation(
        "another-call-between-hosts-taken",
        "shm/host_messages.py",
        "return DONE if equal(Header(place_of(message)), program.header) else MISMATCH",
        "return DONE",
        "A rank takes the data of another call from a rank of another host.",
    ),
    Mutation(
        "sends-to-hosts-not-waited-for",
        "planning/shm_instructions.py",
        "        yield from map(Complete, self._sent)\n",
        "",
        "A step overwrites what the MPI still sends to another host.",
    ),
    Mutation(
        "repeated-calls-between-hosts-not-counted",
        "shm/executable.py",
        "self._counts[message.receives][message.peer] += times",
        "self._counts[message.receives][message.peer] += 1",
        "After a mismatch, ranks of several hosts wait for messages that nobody sends.",
    ),
    Mutation(
        "damaged-code-loaded",
        "compiler/object_files.py",
        "if hashlib.sha256(rest).digest() != digest:",
        "if not digest:",
        "A damaged file of machine code ends each process that loads it.",
    ),
    Mutation(
        "failed-meeting-counted",
        "rendezvous/stores.py",
        "store.add(counter, -1)",
        "pass",
        "A rank that calls init again after a timeout never meets the others.",
    ),
    Mutation(
        "baseline-of-another-place",
        "bench/table.py",
        "if t.contender != OURS and t.place == place]",
        "if t.contender != OURS]",
        "The speedup compares a call out of place with a baseline in place.",
    ),
    Mutation(
        "drawn-before-its-receiver-is-there",
        "picture/layout.py",
        "messages[message] = max(both)",
        "messages[message] = min(both)",
        "A picture shows a message before both its ranks are in their steps.",
    ),
    Mutation(
        "threads-shared-by-all-hosts",
        "supervisor/launcher.py",
        "max(1, cores // job.ranks_per_host)",
        "max(1, cores // job.ranks)",
        "Ranks of several hosts leave most cores idle.",
    ),
    Mutation(
        "sizes-cut-off",
        "launch/explain.py",
        "if nbytes and nbytes % size == 0:",
        "if nbytes >= size:",
        "explain writes 1 MiB for a message of 1.5 MiB.",
    ),
    Mutation(
        "doctor-fails-where-jobs-run",
        "launch/doctor.py",
        "return int(essential)",
        "return int(bool(problems))",
        "`ringreduce doctor` ends with 1 where only Numba is missing.",
    ),
    Mutation(
        "short-yields-not-in-a-row",
        "transports/yielding.py",
        "self.spins = self._short = 0",
        "self.spins = 0",
        "A rank that shares its core polls without a pause, and takes it from the other process.",
    ),
    Mutation(
        "place-of-the-outer-job",
        "system/place.py",
        "if outer or name not in variables:",
        "if name not in variables:",
        "All ranks of a job that a rank has started take that rank's place.",
    ),
    # --- the process group of torch ---
    Mutation(
        "factor-left-in-the-tensor",
        "torch/group.py",
        "reduced, op = prepare_copy(opts.reduceOp, x)",
        "reduced, op = x, prepare(opts.reduceOp, x)",
        "A reduce with a factor changes the tensors of ranks that get no result.",
    ),
    Mutation(
        "exchanged-in-place-without-room",
        "torch/group.py",
        "out.flags.c_contiguous and not np.may_share_memory(x, out)",
        "out.flags.c_contiguous",
        "An all-to-all into its own input overwrites pieces that it has yet to send.",
    ),
    Mutation(
        "root-writes-and-others-read",
        "torch/group.py",
        "writes = opts.rootRank != self._rank",
        "writes = opts.rootRank == self._rank",
        "A broadcast into a tensor that torch has yet to negate changes a copy of the tensor.",
    ),
    Mutation(
        "timeout-for-each-call",
        "torch/works.py",
        "None if end is None else max(end - time.monotonic(), 1e-6)",
        "seconds",
        "A wait for the calls of a list takes its timeout for each of them.",
    ),
    Mutation(
        "over-before-its-functions",
        "torch/works.py",
        "                try:\n                    function()\n                finally:\n"
        "                    self._left -= 1",
        "                self._left -= 1\n                function()",
        "A Work says that it is completed while its tensor has yet to be written.",
    ),
    Mutation(
        "elements-for-bytes",
        "torch/shared.py",
        "begin = tensor.data_ptr() - address",
        "begin = tensor.storage_offset()",
        "A part of a moved tensor is not reduced, but other elements are.",
    ),
    Mutation(
        "file-closed-before-the-process-starts",
        "torch/shared.py",
        "vars(process).setdefault(_COPIES, []).append(copy)",
        "pass",
        "A process that is started with a moved tensor cannot open the tensor's file.",
    ),
    Mutation(
        "tag-for-peer",
        "torch/functional.py",
        "group.recv([x], peer, tag)",
        "group.recv([x], tag, peer)",
        "Compiled code receives from the rank whose number is the tag.",
    ),
    Mutation(
        "lengths-that-do-not-add-up",
        "torch/lists.py",
        "if len(lengths) != size or sum(lengths) != first:",
        "if len(lengths) != size:",
        "Split sizes that leave out the last rows send these rows, too.",
    ),
    Mutation(
        "clock-of-another-host-turned-round",
        "trace/traces.py",
        "found.append((error_s, float(theirs) - sent_s - error_s))",
        "found.append((error_s, sent_s + error_s - float(theirs)))",
        "In a trace, the events of another host are at the wrong times.",
    ),
    Mutation(
        "short-floats-never-taken",
        "torch/tensors.py",
        "if reduces and dtype.itemsize == 1",
        "if dtype.itemsize == 1",
        "Tensors of 8-bit floats cannot be broadcast.",
    ),
]
