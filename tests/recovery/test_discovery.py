"""The command that says how many ranks there is room for."""

from __future__ import annotations

import platform
import time

import pytest

from ringreduce.supervisor import discovery
from ringreduce.supervisor.discovery import Discovery, DiscoveryError, slots_of
from ringreduce.supervisor.membership import Rules

RULES = Rules(ranks=4, least=2, most=6)


def test_the_slots_of_this_host_are_added():
    assert slots_of("") == 0
    assert slots_of("localhost:2\n\n  127.0.0.1 \n") == 3
    assert slots_of(f"{platform.node()}:5") == 5


@pytest.mark.parametrize("line", ["localhost:", "localhost:-1", ":3", "localhost:two"])
def test_lines_that_are_none_are_refused(line):
    with pytest.raises(DiscoveryError, match="wanted host:slots"):
        slots_of(line)


def test_a_job_begins_with_what_there_is_room_for():
    assert Discovery("echo localhost:3").first(RULES) == 3
    assert Discovery("echo localhost:9").first(RULES) == 4
    with pytest.raises(DiscoveryError, match=r"room for ranks: 1; --elastic wants at least 2"):
        Discovery("echo localhost").first(RULES)


def answers(asked: Discovery, count: int) -> list[object]:
    """The next answers, and the texts of the errors."""
    found: list[object] = []
    end = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end:
        try:
            slots = asked.tick(time.monotonic())
            found += [] if slots is None else [slots]
        except DiscoveryError as error:
            found.append(str(error))
        time.sleep(0.002)
    return found


def test_the_command_is_asked_again_and_may_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(discovery, "_EVERY_S", 0.01)
    path = tmp_path / "slots"
    path.write_text("localhost:2")
    asked = Discovery(f"cat {path}")
    assert asked.first(RULES) == 2
    assert answers(asked, 2) == [2, 2]
    path.unlink()
    (text,) = answers(asked, 1)
    assert text == f"--discover 'cat {path}' ended with exit code 1"
    path.write_text("localhost:5")
    assert 5 in answers(asked, 2)
    asked.close()


@pytest.mark.parametrize("command", ["no-such-command-here", "", "unbalanced 'quote"])
def test_a_command_that_cannot_run_is_refused(command):
    with pytest.raises(DiscoveryError, match="cannot run"):
        Discovery(command).first(RULES)


def test_a_command_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(discovery, "_ANSWER_S", 0.05)
    with pytest.raises(DiscoveryError, match=r"did not end within 0\.05 s"):
        Discovery("sleep 600").first(RULES)
    asked = Discovery("sleep 600")
    assert answers(asked, 1) == ["--discover 'sleep 600' did not end within 0.05 s"]
    asked.tick(asked.wakes_at)
    asked.close()
