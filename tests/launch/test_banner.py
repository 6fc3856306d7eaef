"""What mpiexec prints reaches standard output as it comes, but for hydra's banners."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.supervisor.banner import relay

LINE = "=" * 83
MPICHS = f"""
{LINE}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT a-host
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{LINE}
"""
INTELS = f"""
{LINE}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 1 PID 4711 RUNNING AT a-host
=   KILLED BY SIGNAL: 9 (Killed)
{LINE}
"""
LAST = """YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""
BANNERS = MPICHS, INTELS, LAST


def relayed(pieces: Sequence[bytes]) -> bytes:
    source, fills = os.pipe()
    result, target = os.pipe()
    thread = threading.Thread(target=relay, args=(source, target))
    thread.start()
    for piece in pieces:
        os.write(fills, piece)
    os.close(fills)
    thread.join()
    os.close(target)
    with open(result, "rb") as file:
        os.close(source)
        return file.read()


texts = st.text("=\n YOUR", max_size=12)


@given(
    st.lists(texts | st.sampled_from(BANNERS), max_size=6),
    st.lists(st.integers(0, 800), max_size=8),
)
def test_banners_are_left_out_wherever_the_output_is_cut(parts, cuts):
    text = "".join(parts).encode()
    at = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(at) if begin < end]
    assert relayed(pieces) == "".join(part for part in parts if part not in BANNERS).encode()


@pytest.mark.parametrize("text", ["=", LINE, f"\n{LINE}\n= BAD", MPICHS[:-1], LAST[:60], "\n"])
def test_what_may_begin_a_banner_but_ends_is_not_lost(text):
    assert relayed([text.encode()]) == text.encode()


def test_a_line_is_there_before_the_next_one_comes():
    source, fills = os.pipe()
    result, target = os.pipe()
    thread = threading.Thread(target=relay, args=(source, target))
    thread.start()
    for line in b"a line\n", b"\rand a live one", b"\n====":
        os.write(fills, line)
        got = b""
        while len(got) < len(line):
            got += os.read(result, 100)
        assert got == line
    os.close(fills)
    thread.join()
    for each in source, result, target:
        os.close(each)
