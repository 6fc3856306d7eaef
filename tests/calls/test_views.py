"""Arrays of other libraries as arguments: their memory is used, whatever shows it."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.calls.views import _VIEWS, view_of, view_of_all
from tests.support.cases import CONFIG

SHARED = replace(CONFIG, shared_memory=True)


class ByInterface:
    """An array whose type has ``__array_interface__``."""

    def __init__(self, array):
        self.array = array

    @property
    def __array_interface__(self):
        return self.array.__array_interface__


class ByItsOwnInterface:
    """An array which has ``__array_interface__``, and whose type has not."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class ByDlpack:
    """An array with DLPack's methods alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **named):
        return self.array.__dlpack__(**named)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnAGpu(ByDlpack):
    def __dlpack_device__(self):
        return 2, 0


class Broken(ByDlpack):
    def __dlpack__(self, **_):
        raise BufferError("not today")


KINDS = [ByInterface, ByItsOwnInterface, ByDlpack]


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_over_the_same_memory(kind):
    array = np.arange(6.0).reshape(2, 3)
    view = view_of(kind(array))
    assert np.shares_memory(view, array)
    assert (view.shape, view.strides, view.dtype) == (array.shape, array.strides, array.dtype)


@pytest.mark.parametrize(
    "other",
    [
        *(np.ones(3), np.float64(3), 3, "text", None, [1.0], []),
        *(
            np.ma.ones(3),
            OnAGpu(np.ones(3)),
            Broken(np.ones(3)),
            np.array(["a"]).view(np.char.chararray),
        ),
    ],
    ids=lambda other: type(other).__name__,
)
def test_what_is_no_array_of_another_library_has_no_view(other):
    assert view_of_all(other) is None


def test_the_members_of_a_list_are_viewed():
    a, b = np.ones(3), np.zeros(2)
    first, second = view_of_all((ByDlpack(a), b))
    assert np.shares_memory(first, a)
    assert second is b


def test_so_many_types_are_kept():
    for number in range(400):
        array = np.ones(2)
        view = view_of(type(f"Kind{number}", (ByInterface,), {})(array))
        assert np.shares_memory(view, array)
    assert len(_VIEWS) <= 256


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_takes_them(kind, shared):
    def program(comm):
        rank, size = comm.rank, comm.size
        for turn in range(4):
            x, out = np.full(4 * size, rank + turn + 1.0), np.zeros(4 * size)
            everybody = np.arange(size) + turn + 1.0
            into, total = kind(out), everybody.sum()
            assert comm.all_reduce(kind(x), out=into) is into
            assert (out == total).all()
            assert (comm.all_reduce(kind(x), "max") == everybody.max()).all()
            assert comm.all_reduce(x, "min", out=into) is into
            assert (out == everybody.min()).all()
            assert comm.all_reduce(kind(x), "max", out=out) is out
            assert (out == everybody.max()).all()
            given, results = [kind(x), x], (kind(out), np.empty_like(x))
            assert comm.all_reduce(given, out=results) is results
            assert (out == total).all()
            assert (results[1] == total).all()
            comm.reduce_scatter(kind(x), "max", out=kind(out[:4]))
            assert (out[:4] == everybody.max()).all()
            rows = np.zeros((size, 4 * size))
            comm.all_gather(kind(x[None]), counts=[1] * size, out=kind(rows))
            assert (rows == everybody[:, None]).all()
            assert (comm.all_to_all(kind(x)).reshape(size, 4) == everybody[:, None]).all()
            reduced = comm.reduce(kind(x), 1, out=into if rank == 1 else None)
            assert reduced is (into if rank == 1 else None)
            assert (comm.broadcast(kind(x), root=1) == everybody[1]).all()
            own = kind(x)
            assert comm.all_reduce(own, out=own) is own
            assert (x == everybody.sum()).all()
            assert comm.all_reduce(own, out=into, async_op=True).wait() is into

    rr.spawn(program, 2, config=SHARED if shared else CONFIG, timeout_s=120)


def test_a_call_may_be_made_while_an_array_is_viewed():
    """The view is made by Python code, which may do anything."""

    class Calls(ByInterface):
        comm, inner = None, None

        @property
        def __array_interface__(self):
            if self.inner is not None and self.comm is not None:
                comm, self.comm = self.comm, None
                self.inner.append(comm.all_reduce(np.full(5, 2), "prod"))
            return self.array.__array_interface__

    def program(comm):
        results = []
        for turn in range(4):
            x = Calls(np.full(3, comm.rank + turn))
            if turn:
                x.comm, x.inner = comm, []
            results.append(comm.all_reduce(x).tolist())
            assert not turn or x.inner[0].tolist() == [4] * 5
        return results

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120)[0] == [
        [1 + 2 * t] * 3 for t in range(4)
    ]


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_repeated_calls_stay_on_the_fast_path():
    def program(comm):
        x, out = np.ones(4), np.zeros(4)
        comm.all_reduce(x, out=out)
        made = []
        run = comm._engine.run_now
        comm._engine.run_now = lambda *given: made.append(given) or run(*given)
        for _ in range(3):
            for kind in KINDS:
                comm.all_reduce(kind(x), out=kind(out))
                comm.all_reduce(kind(x))
        return len(made)

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [0, 0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_view_that_cannot_be_made_is_an_error(shared):
    def program(comm):
        comm.all_reduce(np.ones(3), out=np.ones(3))
        with pytest.raises(TypeError, match="all_reduce: NumPy cannot read the Broken: not today"):
            comm.all_reduce(Broken(np.ones(3)))
        with pytest.raises(TypeError, match="cannot write to out, a Broken: not today"):
            comm.all_reduce(np.ones(3), out=Broken(np.ones(3)))
        read_only = np.ones(3)
        read_only.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            comm.all_reduce(np.ones(3), out=ByInterface(read_only))

    rr.spawn(program, 2, config=SHARED if shared else CONFIG, timeout_s=120)
