"""A flow written out as one function: straight code, without a loop and with nothing to look up.

A short message takes MPI no longer than Python takes to find its way through lists of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringreduce.messages.binding import BoundStep, Flow


def straight(
    flow: Flow,
    running: list[Flow],
    await_: Callable[[Callable[[], bool]], None],
    foreign: Callable[[int, bytes], None],
    log: Callable[[Flow, BoundStep], None] | None,
) -> Callable[[bytes], None]:
    """``run(header)``: runs the flow alone to its end, every message awaited in its turn.

    It stands in `running` meanwhile.  `await_` waits until a test is true, `foreign` is told of a
    signature that is not `header`, and `log` of every step that has begun.
    """
    code = _Code(flow=flow, running=running, await_=await_, foreign=foreign, log=log)
    for own in flow.own_signatures:
        code.write("{}[:] = header", own)
    code.write("flow.at = 0")
    code.write("running.append(flow)")
    for number, step in enumerate(flow.steps, 1):
        for begin in (*step.packs, *step.starts):
            code.write("{}()", begin)
        if log is not None:
            code.write("log(flow, {})", step)
        for test in step.tests:
            code.write("if not {0}(): await_({0})", test)
        for peer, came in step.signatures:
            code.write("if {0} != header: foreign({1}, bytes({0}))", came, peer)
        for act in step.acts:
            code.write("{}()", act)
        code.write(f"flow.at = {number}")
    code.write("flow.runs += 1")
    code.write("running.clear()")
    return code.compiled()


class _Code:
    """The lines of a function, and the objects that they speak of by name."""

    def __init__(self, **names: Any) -> None:
        self._names = names
        self._lines: list[str] = []

    def write(self, line: str, *objects: Any) -> None:
        """Add a line; each ``{}`` stands for the name of an object."""
        names = [f"_{len(self._names) + i}" for i in range(len(objects))]
        self._names |= dict(zip(names, objects, strict=True))
        self._lines.append(line.format(*names))

    def compiled(self) -> Callable[[bytes], None]:
        """The function.  The objects are those of an enclosing one: no name is looked up twice."""
        body = "\n  ".join(self._lines)
        source = f"def bind({', '.join(self._names)}):\n def run(header):\n  {body}\n return run\n"
        made: dict[str, Any] = {}
        exec(compile(source, "<a flow, written out>", "exec"), made)
        run: Callable[[bytes], None] = made["bind"](**self._names)
        return run
