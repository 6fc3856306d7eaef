"""Records are laid out as others rely on."""

from __future__ import annotations

import pytest

from ringreduce.compiler.records import Record, offset_of, size_of
from ringreduce.shm import layout
from ringreduce.shm.layout import WORD, Slot, Team

INSTRUCTIONS = [
    layout.FreeSlotRecord,
    layout.PostRecord,
    layout.WaitRecord,
    layout.CopyRecord,
    layout.ReduceRecord,
]


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_every_instruction_fits_and_begins_with_its_opcode(instruction):
    assert size_of(instruction) <= layout.INSTRUCTION_BYTES
    assert offset_of(instruction, "opcode") == offset_of(layout.InstructionRecord, "opcode") == 0


@pytest.mark.parametrize("instruction", INSTRUCTIONS[:3])
def test_instructions_of_the_protocol_begin_alike(instruction):
    assert offset_of(instruction, "round") == offset_of(layout.InstructionRecord, "round")


def test_data_in_a_slot_follow_its_header():
    assert offset_of(Slot, "input") == layout.DATA_OFFSET


def test_the_ranges_of_a_read_are_one_array():
    beside = offset_of(Team, "remote") - offset_of(Team, "local")
    assert beside == size_of(layout.MemoryRange)


def test_every_record_is_made_of_words():
    records = [r for r in vars(layout).values() if isinstance(r, type) and issubclass(r, Record)]
    assert len(records) > 20
    assert all(size_of(record) % WORD == 0 for record in records if record is not Record)
