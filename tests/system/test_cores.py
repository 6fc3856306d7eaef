"""The cores that the control groups of a process allow, read from files of the test."""

from __future__ import annotations

import math

import pytest

from ringreduce.system import cores

NESTED = {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}
OLD = {
    "cpu/cpu.cfs_quota_us": "-1",
    "cpu/cpu.cfs_period_us": "100000",
    "cpu/a/cpu.cfs_quota_us": "50000",
    "cpu/a/cpu.cfs_period_us": "20000",
}


@pytest.mark.parametrize(
    ("files", "own", "quota"),
    [
        ({}, "0::/\n", math.inf),
        ({"cpu.max": "max 100000"}, "0::/\n", math.inf),
        (NESTED, "0::/a/b\n", 1.5),  # the smallest of the path
        (NESTED, "0::/\n", math.inf),
        ({"cpu.max": "200000 100000"}, "0::/not/mounted/here\n", 2.0),  # a container sees its root
        ({"cpu.max": "300000 100000"}, "0::/../outside\n", 3.0),
        (NESTED, b"0::/a/caf\xe9\n", 1.5),
        (OLD, "5:memory:/a\n4:cpu,cpuacct:/a\n1:name=systemd:/a\n", 2.5),
        ({"cpu.max": "no number"}, "0::/\n", math.inf),
        ({"cpu.max": "200000 100000"}, None, math.inf),  # a kernel without control groups
    ],
)
def test_the_quota_is_the_smallest_of_the_nested_groups(tmp_path, files, own, quota) -> None:
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_bytes(own if isinstance(own, bytes) else own.encode())
    assert cores.quota(tmp_path / "cgroup", tmp_path / "own") == quota


@pytest.mark.parametrize(("quota", "count"), [(1.5, 1), (0.5, 1), (2.0, 2), (math.inf, 4)])
def test_a_host_has_as_many_cores_as_the_quota_allows(monkeypatch, quota, count) -> None:
    monkeypatch.setattr(cores, "quota", lambda: quota)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores.usable() == count
