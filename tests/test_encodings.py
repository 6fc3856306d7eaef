"""No text of ours ends a program whose output cannot be encoded."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from ringreduce.terminal import LiveLine, print_error

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SETTINGS = [*({"PYTHONIOENCODING": name} for name in ("ascii", "latin-1", "gbk")), C_LOCALE]
COMMANDS = [
    "ringreduce explain -n 4",
    "ringreduce explain -n 2 --pipeline 1f1b",
    "ringreduce train --strategy help",
    "ringreduce completion bash",
    "ringreduce.train --epochs 1 --hidden 4",
    "ringreduce.train --help",
]


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: next(iter(each.values())))
def test_a_command_replaces_what_its_output_cannot_encode(setting, command):
    argv = [sys.executable, "-m", *command.split()]
    ended = subprocess.run(argv, env=os.environ | setting, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_a_live_line_of_a_users_program_replaces_it_too():
    out = stream("ascii")
    with LiveLine(out) as live:
        live.print("[██] µs \udcff")
    out.seek(0)
    assert out.read() == "[??] ?s ?\n"


def test_an_error_is_printed_where_standard_error_is_strict(monkeypatch):
    out = stream("latin-1")
    monkeypatch.setattr(sys, "stderr", out)
    print_error("µ → \udcff")
    out.seek(0)
    assert out.read() == "µ ? ?\n"


@pytest.mark.parametrize("closed", [None, io.StringIO()])
def test_an_error_without_a_standard_error_is_dropped(monkeypatch, closed):
    if closed is not None:
        closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    print_error("lost")
