"""The memory files that the supervisor holds, so that a state outlives the ranks that write it.

A program may call `elastic` several times; each call has a number and files of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ringreduce.recovery.saving import Saving
from ringreduce.recovery.slots import NEVER, Slots

_VISIBLE_S = 1e-3
"""Seconds after which all processes see what one has written to memory."""


class HeldFiles:
    def __init__(
        self, folder: Path | None = None, begin: Slots | None = None, every_s: float = 60.0
    ) -> None:
        """Hold no file; or `begin`, with which the first call begins.

        States of programs that name no folder are saved to `folder`, every `every_s`
        seconds.
        """
        self._written: dict[int, list[Slots]] = defaultdict(list)
        """Number of the call -> files of the ranks of the present generation."""
        self._owners: dict[Slots, object] = {}
        self.saving: dict[int, Saving] = {}
        """Number of the call -> where its state is saved if the job cannot go on."""
        self._sources: dict[int, Slots] = {}
        """Number of the call -> file with which the present generation begins."""
        if begin is not None:
            self._sources[1] = begin
        self._otherwise = None if folder is None else Saving(str(folder.absolute()), {})
        self._every_s = every_s
        self._pause: tuple[int, int] | None = None
        """``(call, step)`` after which all ranks pause; None: they do not."""

    def take(self, call: int, file: int, ranks: int, owner: object = None) -> None:
        """Hold the file of `owner`, a rank of the present generation, which has `ranks` ranks.

        Raises ValueError if it is no such file.
        """
        slots = Slots.from_file(file)
        self._written[call].append(slots)
        self._owners[slots] = owner
        if self._pause is not None:
            slots.pause_at(0)
        if len(self._written[call]) == ranks and call in self._sources:
            self._sources.pop(call).close()  # every rank has its own copy

    def source(self, call: int) -> Slots | None:
        return self._sources.get(call)

    def regular(self, call: int) -> dict[str, Any]:
        """Return the folder for regular checkpoints of a call, or None, and their interval."""
        saving = self._otherwise if call == 1 else None
        return {"folder": saving and saving.folder, "every_s": self._every_s}

    @property
    def step(self) -> int:
        """The number of committed steps of the last call."""
        calls = self._written.keys() | self._sources.keys()
        return max((slots.step for slots in self._of(max(calls))), default=0) if calls else 0

    @property
    def committed_at(self) -> float:
        """When a rank of the present generation last committed, by the monotonic clock."""
        every = [slots.committed_at for files in self._written.values() for slots in files]
        return max(every, default=0.0)

    # --- a step after which all ranks pause ---

    def pause(self) -> None:
        """Have all ranks of the last call pause after the same step, one that none has passed.

        Each rank looks after each step.  From the first store on, none makes more than one step
        without a pause, so that step is later than those of all files.
        """
        call = max(self._written)
        files = self._written[call]
        for slots in files:
            slots.pause_at(0)
        time.sleep(_VISIBLE_S)  # a rank that has looked before shows the step of that time
        step = max(slots.step for slots in files) + 1
        for slots in files:
            slots.pause_at(step)
        self._pause = call, step

    @property
    def pauses(self) -> bool:
        return self._pause is not None

    def is_early(self, call: int, step: int) -> bool:
        """Whether the pause of call `call` is due only after a later step than `step`."""
        if self._pause is None:
            return True
        if call > self._pause[0]:  # this call began after the last was to pause
            self.pause()
        return (call, step) < self._pause

    def go_on(self) -> None:
        if self._pause is not None:
            self._pause = None
            for files in self._written.values():
                for slots in files:
                    slots.pause_at(NEVER)

    def begin_generation(self, generation: int, lost: Collection[object]) -> None:
        """Let ranks go on in another generation, all but those that are lost."""
        for files in self._written.values():
            for slots in files:
                if self._owners[slots] not in lost:
                    slots.begin_generation(generation)

    def revoke(self) -> None:
        for files in self._written.values():
            for slots in files:
                slots.revoke()

    def ahead(self, lost: Collection[object]) -> Slots | None:
        """Return the file of a lost rank that has made more steps of the last call than others."""
        files = self._written[max(self._written)] if self._written else []
        best = max(files, key=lambda slots: slots.step, default=None)
        left = [slots.step for slots in files if self._owners[slots] not in lost]
        return None if best is None or best.step in left else best

    def drop(self, lost: Collection[object]) -> None:
        """Give up the files of lost ranks; the others have caught up with them."""
        for call, files in self._written.items():
            kept = [slots for slots in files if self._owners[slots] not in lost]
            for slots in files:
                if slots not in kept:
                    del self._owners[slots]
                    slots.close()
            self._written[call] = kept

    def next_generation(self) -> None:
        """Keep the most advanced file of each call, for the next generation to begin with."""
        for call in list(self._written.keys() | self._sources.keys()):
            files = self._of(call)
            best = max(files, key=lambda slots: slots.step)
            for slots in files:
                if slots is not best:
                    slots.close()
            self._sources[call] = best
        self._written.clear()
        self._owners.clear()
        self._pause = None

    def save(self, generation: int) -> str:
        """Save the state of the last call after generation `generation`; return a text about it."""
        calls = self._written.keys() | self._sources.keys()
        if not calls:
            return "there is nothing to save"
        call = max(calls)
        slots = max(self._of(call), key=lambda slots: slots.step)
        saving = self.saving.get(call, self._otherwise)
        if saving is None:
            return f"step {slots.step} was the last; nothing is saved, for no folder is named"
        try:
            saving.save(slots, generation, call)
        except Exception as error:  # the supervisor reports it, and goes on to its end
            return f"step {slots.step} was the last; it cannot be saved: {error}"
        return f"step {slots.step} is saved in {saving.folder}"

    def close(self) -> None:
        for call in self._written.keys() | self._sources.keys():
            for slots in self._of(call):
                slots.close()
        self._written.clear()
        self._owners.clear()
        self._sources.clear()

    def _of(self, call: int) -> list[Slots]:
        source = self._sources.get(call)
        return [*self._written.get(call, ()), *([source] if source is not None else [])]
