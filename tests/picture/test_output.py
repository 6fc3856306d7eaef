"""Files of pictures: whether one can be written, found out without writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringreduce.picture import output


def test_a_file_that_can_be_written_is_not_made(tmp_path: Path) -> None:
    output.check_writable(tmp_path / "new.svg")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_be_written_again_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("old")
    output.check_writable(tmp_path / "old.svg")
    assert (tmp_path / "old.svg").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "error"), [(".", IsADirectoryError), ("nowhere/new.svg", FileNotFoundError)]
)
def test_the_error_names_the_file(tmp_path: Path, name: str, error: type[OSError]) -> None:
    with pytest.raises(error, match=str(tmp_path / name)):
        output.check_writable(tmp_path / name)
