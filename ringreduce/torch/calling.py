"""How torch and its users call a process group, and what its profiler and debug modes show.

torch.distributed passes lists of tensors, and an object with options.  A program that calls the
group itself may leave the options out, and may pass single tensors: ``group.broadcast(tensor, 0)``.

For other backends torch's dispatcher shows the operator of each collective to modes such as
`CommDebugMode`, which counts them.  torch calls a group in Python without the dispatcher, so
`in_modes` shows an object like the operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import profiler
from torch.distributed import distributed_c10d  # noqa: F401 - it makes the operators c10d
from torch.utils import _python_dispatch

from ringreduce.errors import counted

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""Values that programs pass in place of options: the fields of the options that hold them."""
_PARAMETERS = {
    **dict.fromkeys(("output_tensor", "output_tensors", "output_lists"), "outputs"),
    **dict.fromkeys(("input_tensor", "input_tensors", "input_list"), "inputs"),
    "outputTensor": "output",
    "inputTensor": "input",
    "output_split_sizes": "output_splits",
    "input_split_sizes": "input_splits",
    "dstRank": "peer",
    "srcRank": "peer",
}
"""By torch's name of a parameter: its name in the methods here, if that is another."""
_NOT_COMPILED = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)
"""This tells `torch.compile` to compile neither a function nor the functions that it calls."""
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled


class _ProfilerStarts:
    """A count of the profilers that have started.  torch calls it when a profiler starts."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self.number = 0
        self._on_start = on_start

    def __call__(self) -> None:
        self.number += 1
        self._on_start()


_starts = profiler._run_on_profiler_start = _ProfilerStarts(profiler._run_on_profiler_start)


def collective(
    shown: str, options: Any = None, values: Sequence[str] = (), *, of_lists: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method of a process group callable in all forms that torch's own groups accept.

    A profiler shows a call as ``ringreduce:<shown> <bytes> B``: the bytes of its input or its
    output on this rank, whichever are more.  `options` is torch's class of options, which the
    method takes last; `values` are the keys of `_FIELDS` that may be passed in its place, in
    this order.  `of_lists`: the method takes lists of tensors, in whose place tensors may be
    passed.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(inspect.signature(method).parameters)[1:]
        if options is not None:
            names = names[:-1]
        tensors = len(names)

        @wraps(method)
        def called(self: Any, *args: Any, **named: Any) -> Any:
            if named:
                args, named = _with_named(args, named, names)
                if options is None and named:
                    raise TypeError(f"unknown arguments: {', '.join(named)}")
            if options is not None and (named or not (args and isinstance(args[-1], options))):
                args = _with_options(args, named, tensors, options(), values, of_lists)
            run = partial(_profile, shown, method) if _is_profiled() else method
            if modes_are_active():
                work = in_modes(method.__name__, partial(run, self), args)
            else:
                work = run(self, *args)
            if options is not None:
                self.sequence_number += 1
            return work

        eval_frame.set_code_exec_strategy(called.__code__, _NOT_COMPILED)  # type: ignore[attr-defined]
        return called

    return wrap


def _with_named(
    args: Sequence[Any], named: dict[str, Any], names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the arguments that were passed by torch's names to their places among `args`.

    Returns all arguments that have a place among `names`, and the others by name.  Raises
    TypeError if an argument is missing or was passed twice.
    """
    given, others = {}, {}
    for name, value in named.items():
        parameter = _PARAMETERS.get(name, name)
        if parameter in names:
            given[parameter] = value
        elif f"{parameter}s" in names:  # one tensor in place of a list
            given[f"{parameter}s"] = value
        else:
            others[name] = value
    placed = list(args)
    for place, parameter in enumerate(names):
        if parameter in given:
            if place != len(placed):
                raise TypeError(f"{parameter} was passed twice, or an argument before is missing")
            placed.append(given[parameter])
    return tuple(placed), others


def _with_options(
    args: Sequence[Any],
    named: dict[str, Any],
    tensors: int,
    options: Any,
    values: Sequence[str],
    of_lists: bool,
) -> tuple[Any, ...]:
    """Return the arguments of a method: `tensors` arguments, which hold tensors, and the options.

    Raises TypeError for what torch does not know.
    """
    given, passed = list(args[:tensors]), args[tensors:]
    if "opts" in named and passed:
        raise TypeError("pass either opts, or values in their place")
    if "opts" in named:
        options, values = named.pop("opts"), ()
    known = ", ".join(values) or "nothing"
    if len(passed) > len(values):
        follow = f"{counted(len(passed), 'argument')} follow{'s' * (len(passed) == 1)}"
        raise TypeError(f"{follow} the tensors; pass {known}")
    for name in values[: len(passed)]:
        if name in named:
            raise TypeError(f"{name} was passed twice")
    named |= zip(values, passed, strict=False)
    for name, value in named.items():
        if name not in values:
            raise TypeError(f"unknown argument {name!r}; pass opts alone, or {known}")
        if value is not None:
            setattr(options, _FIELDS[name], value)
    if of_lists and any(isinstance(each, torch.Tensor) for each in given):
        given = [[each] for each in given]
    return (*given, options)


def _profile(shown: str, method: Callable[..., Any], group: Any, *args: Any) -> Any:
    nbytes = max((sum(map(_bytes_of, _tensors_of(each))) for each in args), default=0)
    over: Any = torch.futures.Future()
    began_under = _starts.number
    with profiler.record_function(f"ringreduce:{shown} {nbytes} B") as record:
        work = method(group, *args)
        record._call_end_callbacks_on_future(over)

    def end_record() -> None:
        # A profiler that stops frees its records.  torch would write the end of this record into
        # freed memory, also while the next profiler runs.
        if profiler._is_profiler_enabled and _starts.number == began_under:
            over.set_result(None)

    work.at_end(end_record)
    return work


def _tensors_of(argument: Any) -> list[Any]:
    """Return a tensor, or all tensors in lists, as a list; an empty one for anything else."""
    if isinstance(argument, (list, tuple)):
        return [tensor for each in argument for tensor in _tensors_of(each)]
    return [argument] if isinstance(argument, torch.Tensor) else []


def _bytes_of(tensor: Any) -> int:
    values = tensor._values() if tensor.is_sparse else tensor
    return int(values.nbytes)


_OPERATORS = {
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "recv_anysource": "recv_any_source_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "send": "send",
}
"""The operators of some methods.  For any other method it is the name of the method and ``_``."""
modes_are_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Operator:
    """A call of a group, in place of torch's operator for the same collective."""

    def __init__(self, method: str, call: Callable[..., Any]) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, _OPERATORS.get(method, f"{method}_"))
        self._call = call

    def __call__(self, *args: Any, **_: Any) -> Any:
        return self._call(*args)

    def __str__(self) -> str:
        return str(self._overloadpacket.default)


def in_modes(method: str, call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Make a call, and have each `CommDebugMode` that is active count it."""
    from torch.distributed.tensor.debug import CommDebugMode

    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, CommDebugMode):
            call = partial(_in_mode, mode, _Operator(method, call))
    return call(*args)


def _in_mode(mode: Any, operator: _Operator, *args: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args)
