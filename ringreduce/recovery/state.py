"""The arrays of a training loop: a kill leaves those of a whole update."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ringreduce.calls.refusals import refusals_here, refuse_copy
from ringreduce.console.terminal import print_error
from ringreduce.errors import shown
from ringreduce.recovery.change import OF_A_RESIZE, Change
from ringreduce.recovery.checkpoint import RESERVED
from ringreduce.recovery.saving import Saving
from ringreduce.recovery.slots import Slots, is_storable

_MOST_BYTES = 1 << 15
"""Bytes of the longest facts, as JSON."""
_NO_CALLS = "communication inside an update of a State; reduce before `with state.update():`"


class State:
    """Arrays that outlive the process that writes them, and the number of updates made.

    The arrays are in a memory file.  Each has two slots, so that a process that is killed leaves
    the arrays of its last whole update.  A State belongs to one rank.  `update` sends nothing.

    Args:
        arrays: name -> array of numbers, of any shape.  They are copied.
        sampler: the samples of each step, kept for the training loop.

    Attributes:
        sampler: as passed.
        saving: what `save_to` has set; None before.
        described: what `describe` has set.

    Raises:
        TypeError: `arrays` is empty, or no mapping of names to arrays of numbers.
        OSError: there is too little memory.

    Example:
        >>> state = rr.State({"weight": np.zeros(3), "bias": np.zeros(1)})
        >>> with state.update():
        ...     state["weight"] += 1
        >>> state.step, state["weight"].tolist()
        (1, [1.0, 1.0, 1.0])
    """

    __module__ = "ringreduce"

    __reduce__ = refuse_copy

    def __init__(self, arrays: Mapping[str, ArrayLike], sampler: Any = None) -> None:
        self.sampler = sampler
        self._slots = Slots.new(_checked(arrays))
        self._generation = self._slots.generation
        self._written: dict[str, np.ndarray] | None = None
        """Name -> slot of the arrays that the update has read or replaced; None outside one."""
        self._hooks: list[Callable[[Change], None]] = []
        self.saving: Saving | None = None
        self.described: dict[str, Any] = {}
        self._after: Callable[[State, bool], None] | None = None
        """Called after each update, in a job with a supervisor."""
        self._tell_unsaved: Callable[[str], None] = print_error

    @property
    def step(self) -> int:
        """Number of updates made."""
        return self._slots.step

    @property
    def generation(self) -> int:
        """Number of the membership of ranks; the first is 1."""
        return self._slots.generation

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots.entries)

    def __len__(self) -> int:
        return len(self._slots.entries)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array.

        Outside an update it cannot be written, and the update after the next may overwrite it.
        Inside an update it is the new array, which begins with the committed values.  It becomes
        read-only when the update ends.  Views of it stay writable: do not keep them.

        Raises:
            KeyError: there is no array of this name.
        """
        written = self._written
        if written is not None and name in written:
            return written[name]
        self._check_name(name)
        committed = self._slots.committed(name)
        if written is None:
            return committed
        array = self._new(name, written)
        array[...] = committed
        return array

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        """Replace an array, inside an update.  The committed values are not copied before.

        Raises:
            KeyError: there is no array of this name.
            OverflowError: a whole number does not fit the dtype.
            TypeError: the values are of another kind, such as floats for an array of whole numbers.
            ValueError: the values have another shape, or there is no update.
        """
        self._check_name(name)
        if self._written is None:
            raise ValueError(
                f"state[{name!r}] is replaced outside an update; use `with state.update():`"
            )
        new, dtype = np.asarray(value), np.dtype(self._slots.entries[name].dtype)
        if not hasattr(value, "dtype") and new.dtype.kind in "iu" and dtype.kind in "iu":
            new = np.asarray(value, dtype)  # Python's whole numbers have no dtype
        array = self._written.get(name)
        if array is None:
            array = self._slots.writable(name)
            array.flags.writeable = True
        if new.shape != array.shape:
            raise ValueError(
                f"state[{name!r}] has shape {array.shape}; the new values have {new.shape}"
            )
        if not np.can_cast(new.dtype, array.dtype, "same_kind"):
            raise TypeError(f"state[{name!r}] is {array.dtype}; the new values are {new.dtype}")
        if new is not array:
            np.copyto(array, new, casting="same_kind")
        self._written[name] = array

    def empty(self, name: str) -> np.ndarray:
        """Return the new array of the update, with any values: write all of them.

        It saves the copy that ``state[name]`` makes, for results that are computed in place::

            weight = state["w"]                      # the committed values
            with state.update():
                np.subtract(weight, step, out=state.empty("w"))

        Args:
            name: name of the array.

        Returns:
            The array, which becomes read-only when the update ends.

        Raises:
            KeyError: there is no array of this name.
            ValueError: there is no update.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> before = state["x"]
            >>> with state.update():
            ...     _ = np.add(before, 1, out=state.empty("x"))
            >>> state["x"].tolist()
            [1.0, 1.0]
        """
        written = self._written
        if written is None:
            raise ValueError(f"empty: {name!r} outside an update; use `with state.update():`")
        if name in written:
            return written[name]
        self._check_name(name)
        return self._new(name, written)

    def update(self) -> AbstractContextManager[None]:
        """Change arrays, all at once.

        All changes count when the block ends, and `step` grows by 1.  If the block raises, or the
        process is killed inside it, none counts.  A signal handler that raises at the very end may
        raise after the changes count.  Arrays that the block does not touch keep their values.

        The block may not communicate: a rank that waits for others inside its update could keep
        them from theirs.  Calls of communicators that this thread has made raise ValueError.
        Asynchronous calls may be begun before the block and waited for inside.

        Returns:
            A context manager.

        Raises:
            ValueError: inside another update of this State.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> with state.update():
            ...     state["x"] = [1, 2]
            >>> state.step, state["x"].tolist()
            (1, [1.0, 2.0])
        """
        return _Update(self)

    def save_to(self, folder: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        """Have the launcher save the arrays if the job cannot go on.

        In a job with ``--elastic`` whose launcher gets a signal, or that has lost too many ranks,
        the launcher writes the arrays of the last update into the folder: as
        ``step-000000120.safetensors``, with a manifest in JSON beside it.  Call it on every rank,
        before `elastic` or in the function that makes the State.

        Args:
            folder: the folder.  It must not be locked by a process that outlives the ranks.
            facts: names and values that JSON can represent, for the manifest.

        Raises:
            TypeError: JSON cannot represent the facts.
            ValueError: a fact has a name that the manifest uses itself, or the facts have more
                than 32 KiB as JSON.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> state.save_to("checkpoints", {"model": "a line"})
        """
        if used := sorted(RESERVED & facts.keys()):
            raise ValueError(
                f"save_to: the manifest has {', '.join(used)} of its own; rename yours"
            )
        _check_length("save_to", facts)
        self.saving = Saving(os.path.abspath(folder), dict(facts))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the events ``resized`` of ``--events``, such as the learning rate.

        The event that tells of a generation's first step has those that were last passed before
        it.  Call it on every rank alike.

        Args:
            facts: names and values that JSON can represent.

        Raises:
            TypeError: JSON cannot represent the facts.
            ValueError: a fact has a name that the event uses itself, or the facts have more than
                32 KiB as JSON.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> state.describe({"batch": 96, "lr": 0.3})
        """
        if used := sorted(OF_A_RESIZE & facts.keys()):
            raise ValueError(f"describe: the event has {', '.join(used)} of its own; rename yours")
        _check_length("describe", facts)
        self.described = dict(facts)

    def report_unsaved(self, text: str) -> None:
        """Say that an output could not be written, such as a checkpoint or a file of metrics.

        Under ``--elastic`` the launcher prints the first such text, and the job ends with exit code
        1, also if the rank that said so is lost.  Otherwise the text goes to stderr.  Any thread
        may call it.

        Args:
            text: what could not be written, and why.

        Raises:
            TypeError: `text` is no string.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> state.report_unsaved("losses.csv: No space left on device")
        """
        if not isinstance(text, str):
            raise TypeError(f"report_unsaved: text is {shown(text)}; pass a string")
        self._tell_unsaved(text)

    def restore(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Begin after `step` updates with these arrays, such as those of a checkpoint.

        A kill in the middle leaves a mixture.  In a job that goes on after losses, call it before
        `elastic` only.

        Args:
            arrays: an array for each name, of the same shape and dtype.  They are copied.
            step: the number of updates that made them.

        Raises:
            ValueError: the arrays are others than those of the State, or there is an update.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> state.restore({"x": np.ones(2)}, step=7)
            >>> state.step, state["x"].tolist()
            (7, [1.0, 1.0])
        """
        if self._written is not None:
            raise ValueError("restore: inside an update of this State")
        there = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        here = {name: (self[name].shape, self[name].dtype.name) for name in self}
        if there != here:
            names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
            raise ValueError(
                f"restore: the arrays are others than those of the State: {', '.join(names)}"
            )
        self._slots.restore(arrays, step)

    def on_resize(self, hook: Callable[[Change], None]) -> None:
        """Call ``hook(change)`` when a generation begins that follows another.

        It is called on every rank, in `elastic` before the training function, with a `Change`.

        Args:
            hook: a function of a `Change`.

        Raises:
            TypeError: `hook` cannot be called.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> state.on_resize(lambda change: print(change.before, "->", change.after))
        """
        if not callable(hook):
            raise TypeError(
                f"on_resize: {shown(hook)} cannot be called; pass a function of a change"
            )
        self._hooks.append(hook)

    def close(self) -> None:
        """Close the memory file.  Otherwise it is closed when the State is garbage.

        Arrays that were handed out stay valid.

        Raises:
            OSError: somebody else has closed the descriptor.

        Example:
            >>> state = rr.State({"x": np.zeros(2)})
            >>> x = state["x"]
            >>> state.close()
            >>> x.tolist()
            [0.0, 0.0]
        """
        self._slots.close()

    # --- for `elastic` ---

    @property
    def file(self) -> int:
        """:meta private:"""
        return self._slots.file

    def join(
        self,
        generation: int,
        after: Callable[[State, bool], None],
        tell_unsaved: Callable[[str], None],
    ) -> None:
        """Belong to a generation; call ``after(self, pauses)`` after each update.

        `pauses`: all ranks pause after this step.  A supervisor that holds the file has
        already written the generation to it; or it has revoked the lease, which stays
        revoked.

        :meta private:
        """
        self._generation, self._after, self._tell_unsaved = generation, after, tell_unsaved

    def begin_generation(self, generation: int) -> None:
        """Write the first generation to the file, which no supervisor holds yet.

        :meta private:
        """
        self._slots.begin_generation(generation)

    def resized(self, change: Change) -> None:
        """:meta private:"""
        for hook in self._hooks:
            hook(change)

    # --- for `_Update` ---

    def _begin(self) -> None:
        if self._written is not None:
            raise ValueError("update: inside another update of this State")
        self._refusals = refusals_here()
        self._refusals.refuse(_NO_CALLS)
        self._written = {}

    def _end(self, commit: bool) -> None:
        written, slots, pauses = self._written, self._slots, False
        assert written is not None
        try:
            if commit:
                if slots.generation != self._generation:
                    os._exit(1)  # the lease is revoked: another generation takes over
                pauses = slots.commit(written)
        finally:
            for array in written.values():
                array.flags.writeable = False
            self._written = None
            self._refusals.allow()  # another thread may end the update
        if commit and self._after is not None:
            self._after(self, pauses)

    def _new(self, name: str, written: dict[str, np.ndarray]) -> np.ndarray:
        array = written[name] = self._slots.writable(name)
        array.flags.writeable = True
        return array

    def _check_name(self, name: str) -> None:
        if name not in self._slots.entries:
            raise KeyError(f"there is no {name!r}; the arrays are {', '.join(self)}")


class _Update:
    """The block of an update: a class, for a generator would take twice as long."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state._begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._state._end(commit=kind is None)


def _check_length(where: str, facts: Mapping[str, Any]) -> None:
    if (length := len(json.dumps(dict(facts)))) > _MOST_BYTES:
        raise ValueError(f"{where}: facts of {length:,} bytes as JSON, more than {_MOST_BYTES:,}")


def _checked(arrays: Any) -> dict[str, np.ndarray]:
    if not isinstance(arrays, Mapping):
        raise TypeError(f"State: arrays is {shown(arrays)}; pass a dict, name -> array")
    if not arrays:
        raise TypeError("State: arrays is empty; pass what the training loop changes")
    found = {}
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"State: the name {name!r} is no text")
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"State: {name!r} is a masked array; fill it first, x.filled(...)")
        array = np.asarray(value)
        if not is_storable(array.dtype):
            raise TypeError(f"State: {name!r} is an array of {array.dtype}; pass numbers")
        found[name] = array
    return found
