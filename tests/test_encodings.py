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


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: next(iter(each.values())))
def test_a_command_replaces_what_its_output_cannot_encode(setting, command):
    argv = [sys.executable, "-m", *command.split()]
    ended = subprocess.run(argv, env=os.environ | setting, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_lines_of_a_users_program_replace_it_too(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
    monkeypatch.setattr(sys, "stderr", out)
    with LiveLine(out) as live:
        live.print("[██] µs \udcff")
    print_error("µ → \udcff")
    out.seek(0)
    assert out.read() == "[??] µs ?\nµ ? ?\n"


@pytest.mark.parametrize("closed", [None, io.StringIO()])
def test_an_error_without_a_standard_error_is_dropped(monkeypatch, closed):
    if closed is not None:
        closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    print_error("lost")
