"""Compiling at the first start: others wait for it, and the user is told."""

from __future__ import annotations

import threading

import pytest

from ringreduce.compiler import jit
from ringreduce.config import COMPILING, Compiling
from ringreduce.errors import PeerTimeoutError
from ringreduce.transports.thread import Switchboard, ThreadTransport


@pytest.mark.parametrize(("silent_s", "lines"), [(0.0, 1), (600.0, 0)])
def test_the_user_is_told_once_that_a_start_compiles(monkeypatch, capsys, silent_s, lines):
    progress = Compiling()
    monkeypatch.setattr(jit, "_PROGRESS", [progress])
    monkeypatch.setattr(jit, "_SILENT_S", silent_s)
    for name in ("one", "two"):
        release = threading.Event()
        timer = threading.Timer(0.1, release.set)
        timer.start()
        jit._make({}, name, release.wait)
    assert capsys.readouterr().err.count("ringreduce: compiling") == lines
    assert progress.seconds > 0.1
    assert not progress.running


def test_a_rank_waits_for_one_that_compiles_and_not_for_one_that_is_silent(monkeypatch):
    switchboard = Switchboard(2)
    first, second = (ThreadTransport(switchboard, rank, timeout_s=0.05) for rank in range(2))
    monkeypatch.setattr(COMPILING, "running", True)
    timer = threading.Timer(0.3, second.collect, (b"b",))
    timer.start()
    assert first.collect(b"a") == b"ab"
    monkeypatch.setattr(COMPILING, "running", False)
    with pytest.raises(PeerTimeoutError, match="not there: 1"):
        first.collect(b"a")
