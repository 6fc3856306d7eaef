"""The digits are read once, and not by every rank of every test."""

from __future__ import annotations

import functools
from unittest import mock

import pytest

from ringreduce.train import data


@pytest.fixture(scope="package", autouse=True)
def digits_are_read_once():
    with mock.patch.object(data, "load_digits", functools.cache(data.load_digits)):
        yield
