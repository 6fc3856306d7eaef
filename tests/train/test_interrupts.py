"""Ctrl-C ends training with one line, which names the last checkpoint."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest

from ringreduce.recovery.checkpoint import interrupted_text

PATIENCE_S = 300.0


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize(
    "command",
    [
        ["ringreduce", "train", "-n", "2"],
        ["ringreduce", "train", "-n", "2", "--without-mpi"],
        ["ringreduce.train"],
    ],
    ids=["launched", "without-mpi", "alone"],
)
def test_ctrl_c_names_the_last_checkpoint_without_a_traceback(tmp_path, command):
    words = ["--epochs", "100000", "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "50"]
    heeds = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(
        [sys.executable, "-m", *command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heeds,
    ) as training:
        deadline = time.monotonic() + PATIENCE_S
        while not [*tmp_path.glob("step-*.json")] and time.monotonic() < deadline:
            assert training.poll() is None
            time.sleep(0.02)
        training.send_signal(signal.SIGINT)
        output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode in (130, -signal.SIGINT)
    (line,) = re.findall(r"interrupted; step (\d+) is saved in (.+); go on from it", output)
    assert int(line[0]) % 50 == 0
    assert line[1] == str(tmp_path)
    assert "Traceback" not in output


def test_a_folder_that_is_missing_has_no_checkpoint(tmp_path):
    assert interrupted_text(tmp_path / "none") == "interrupted; no checkpoint is saved"
    assert interrupted_text(None) == "interrupted; no checkpoint is saved"
