"""Every field of a record is where the constants have it."""

from __future__ import annotations

import pytest

from ringreduce.compiler.records import offset_of, size_of
from ringreduce.shm import layout
from ringreduce.shm.layout import WORD, Iovec, Program, Slot

FIELDS = [
    (Slot, "sequence", layout.NUMBER),
    (Slot, "header", layout.HEADER),
    (Slot, "input", layout.INPUT_AT),
    (Slot, "output", layout.OUTPUT_AT),
    (Program, "team", layout.COMMON * WORD),
    (Program, "instruction", layout.ROW * WORD),
    (Program, "done_bytes", layout.DONE_BYTES * WORD),
    (Program, "base", layout.BASE * WORD),
    (Program, "rounds", layout.EXCHANGES * WORD),
    (Program, "publishes", layout.TELLS * WORD),
    (Program, "item_bytes", layout.ITEM_BYTES * WORD),
    (Program, "fold", layout.FOLD * WORD),
    (Program, "divisor", layout.DIVISOR * WORD),
    (Program, "blamed", layout.MET * WORD),
    (Program, "header", layout.OWN_HEADER * WORD),
    (Program, "input", layout.INPUT * WORD),
    (Program, "output", layout.OUTPUT * WORD),
    (Program, "scratch", layout.SCRATCH * WORD),
    (Program, "input_location", layout.INPUT_PLACE * WORD),
    (Program, "output_location", layout.OUTPUT_PLACE * WORD),
    (Program, "first_instruction", layout.START * WORD),
    (Program, "input_bytes", layout.INPUT_BYTES * WORD),
    (Program, "output_bytes", layout.OUTPUT_BYTES * WORD),
    (Program, "in_place", layout.IN_PLACE * WORD),
    (Program, "run", layout.RUN * WORD),
    (Iovec, "addresses", layout.PLACES * WORD),
    (Iovec, "sizes", layout.SIZES * WORD),
    (Iovec, "piece", layout.PIECE * WORD),
    (Iovec, "begin", layout.BEGIN * WORD),
]


@pytest.mark.parametrize(("record", "field", "offset"), FIELDS)
def test_a_field_is_where_the_constant_has_it(record, field, offset):
    assert offset_of(record, field) == offset


@pytest.mark.parametrize(
    ("record", "words"), [(Program, layout.PROGRAM_WORDS), (Iovec, layout.PIECES_WORDS)]
)
def test_a_record_is_as_long_as_the_constant_has_it(record, words):
    assert size_of(record) == words * WORD
