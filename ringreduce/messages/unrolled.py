"""A flow unrolled into one function: code without loops and with nothing to look up.

MPI takes no longer for a short message than Python takes for the loops over lists of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringreduce.control.executable import Control
from ringreduce.messages.binding import Flow

Run = Callable[[bytes, Any, Any], None]
"""``run(header, source, target)``: `Executable.run` of `ringreduce.control.executable`."""


def unrolled(
    flow: Flow, under_way: list[Flow], control: Control, own: tuple[Any, Any] | None = None
) -> Run:
    """Return a function that runs `flow` alone to its end, one message after another.

    The flow is in `under_way` while it runs.  `own` are the input and output that the flow is
    bound to, if the function copies the caller's arrays to and from them.
    """
    code = _Code(
        flow=flow,
        under_way=under_way,
        wait_until=control.wait_until,
        report_mismatch=control.report_mismatch,
        log=control.log,
    )
    if own is not None:
        code.write("{}[...] = source", own[0])
    for signature in flow.own_signatures:
        code.write("{}[:] = header", signature)
    code.write("flow.at = 0")
    code.write("under_way.append(flow)")
    for number, step in enumerate(flow.steps, 1):
        for begin in (*step.packs, *step.starts):
            code.write("{}()", begin)
        if control.log is not None:
            code.write("log(flow.slice, {})", step.notes)
        for test in step.tests:
            code.write("if not {0}(): wait_until({0})", test)
        for peer, received in step.signatures:
            code.write("if {0} != header: report_mismatch({1}, bytes({0}))", received, peer)
        for act in step.acts:
            code.write("{}()", act)
        code.write(f"flow.at = {number}")
    code.write("flow.runs += 1")
    code.write("under_way.clear()")
    if own is not None:
        code.write("target[...] = {}", own[1])
    return code.compiled()


class _Code:
    def __init__(self, **names: Any) -> None:
        self._names = names
        self._lines: list[str] = []

    def write(self, line: str, *objects: Any) -> None:
        """Add a line; each ``{}`` stands for the name of an object."""
        names = [f"_{len(self._names) + i}" for i in range(len(objects))]
        self._names |= dict(zip(names, objects, strict=True))
        self._lines.append(line.format(*names))

    def compiled(self) -> Run:
        """Return the function; its objects are variables of an enclosing function, found fast."""
        body = "\n  ".join(self._lines)
        parameters = ", ".join(self._names)
        source = (
            f"def bind({parameters}):\n def run(header, source, target):\n  {body}\n return run\n"
        )
        made: dict[str, Any] = {}
        exec(compile(source, "<an unrolled flow>", "exec"), made)
        run: Run = made["bind"](**self._names)
        return run
