"""Arrays of other libraries, and of subclasses of NumPy's, as arguments: their memory is used."""

from __future__ import annotations

import os
import tempfile
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


class ByArray(ByDlpack):
    """An array whose library shows its memory without DLPack."""

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __dlpack__(self, **_):
        raise AssertionError("the slower way")


class ByCopy(ByDlpack):
    """An array that DLPack alone shows without a copy."""

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("a copy is needed")
        return self.array.copy()


class OnAGpu(ByDlpack):
    def __dlpack_device__(self):
        return 2, 0


class Broken(ByDlpack):
    def __dlpack__(self, **_):
        raise BufferError("not today")


class Unwieldy(np.ndarray):
    """A subclass whose methods do not do what those of arrays do."""

    def reshape(self, *_, **__):
        raise NotImplementedError

    __getitem__ = __setitem__ = copy = __array_ufunc__ = __array_function__ = reshape


def on_disk(x):
    with tempfile.TemporaryFile() as file:  # the mapping stays
        mapped = np.memmap(file, x.dtype, "w+", shape=x.shape)
    mapped[...] = x
    return mapped


KINDS = [ByInterface, ByItsOwnInterface, ByDlpack, ByArray, ByCopy]
SUBCLASSES = {
    "matrix": np.matrix,
    "strided matrix": lambda x: np.matrix(x.T.copy()).T,
    "record array": lambda x: x.view(np.recarray),
    "memory map": on_disk,
    "subclass": lambda x: x.view(Unwieldy),
}


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


@pytest.mark.filterwarnings("ignore:.*the matrix subclass")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "make", [*KINDS, *SUBCLASSES.values()], ids=[*(kind.__name__ for kind in KINDS), *SUBCLASSES]
)
@pytest.mark.parametrize("columns", [2, 600])
def test_every_call_takes_them(shared, make, columns):
    def program(comm):
        ours, theirs = (np.arange(2.0 * columns).reshape(2, -1) * 2 + rank for rank in (0, 1))
        (mine, other), peer = ((ours, theirs), (theirs, ours))[comm.rank], 1 - comm.rank
        total, both = ours + theirs, np.concatenate([ours, theirs])
        x, found = make(mine.copy()), []

        def out(rows=2):
            return make(np.zeros((rows, columns)))

        for turn in range(3):  # compiled code may make the second call
            y, work = make(mine.copy()), comm.send(x, peer, 1 + turn, async_op=True)
            results, shard = (out(), np.zeros_like(mine)), np.zeros(columns)
            shard = make(shard) if make in KINDS else shard  # a matrix has two dimensions
            assert comm.all_reduce([y, mine], out=results) is results
            reduced = comm.reduce(x, 1, out=(of_root := out() if comm.rank else None))
            assert reduced is of_root
            found += [
                *zip(results, (total, total), strict=True),
                *([(reduced, total)] if comm.rank else []),
                (comm.all_reduce(x, "max"), np.maximum(ours, theirs)),
                (comm.all_reduce(x, "max", out=np.zeros_like(mine)), np.maximum(ours, theirs)),
                (comm.all_reduce(mine, "min", out=out()), np.minimum(ours, theirs)),
                (comm.all_reduce(x, out=out(), async_op=True).wait(), total),
                (comm.broadcast(x, 1), theirs),
                (comm.broadcast(y, 1, out=y), theirs),
                (comm.reduce_scatter(x), total.reshape(2, -1)[comm.rank]),
                (comm.reduce_scatter(x, out=shard), total[comm.rank]),
                (comm.all_gather(x), both),
                (comm.all_gather(x, counts=[2, 2], out=out(4)), both),
                (comm.scatter(None if comm.rank else x, out=out(1)), ours[comm.rank, None]),
                (
                    comm.scatter(None if comm.rank else x, out=out(1), counts=[1, 1]),
                    ours[comm.rank, None],
                ),
                (comm.all_to_all(x, out=out()), both[comm.rank :: 2]),
                (comm.exchange({peer: x}, {peer: out()})[peer], other),
                (comm.recv(into := out(), peer, 1 + turn), other),
                (comm.all_reduce(x, out=(sums := out())), total),
            ]
            work.wait()
            assert found[-1][0] is sums
            assert found[-2][0] is into
            own = make(mine.copy())
            assert comm.all_reduce(own, out=own) is own
            found.append((own, total))
        found += [(comm.plan("all_reduce", x, out=out())(), total)]
        if shared:
            array = comm.shared(mine.shape, float)
            array.add(x)
            comm.barrier()
            found += [(array.read(out=out()), total)]
        shown = [np.asarray(getattr(each, "array", each)) for each, _ in found]
        return [i for i, (_, wanted) in enumerate(found) if not np.array_equal(shown[i], wanted)]

    config = SHARED if shared else CONFIG
    assert rr.spawn(program, 2, config=config, timeout_s=120) == [[], []]


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
