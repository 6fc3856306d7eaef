"""Check the arguments of a call, before it sends anything."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from math import prod
from numbers import Number
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ringreduce.calls.elsewhere import WIRES_ELSEWHERE
from ringreduce.calls.ops import is_op_of_mpi, name_of_mpi_op, op_meant_by, op_name
from ringreduce.calls.views import is_tensor, view_of
from ringreduce.devices.cpu import address_of
from ringreduce.errors import counted, did_you_mean
from ringreduce.errors import shown as in_short


def shown(value: Any) -> str:
    """Show a wrong argument: an op of MPI by its name, a list by its type, others in short."""
    if is_op_of_mpi(value) and (name := name_of_mpi_op(value)):
        return f"MPI.{name}"
    return type(value).__name__ if isinstance(value, (list, tuple)) else in_short(value)


def as_host_array(where: str, x: Any) -> np.ndarray:
    """View `x` as a NumPy array without a copy.  A number becomes a 0-d array.

    Raises TypeError unless `x` is an array or a number.
    """
    if isinstance(x, (list, tuple)):
        raise TypeError(f"{where}: got a {type(x).__name__}; pass an array, or numpy.asarray(...)")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where}: got a masked array; fill it first, x.filled(...)")
    if isinstance(x, np.ndarray):
        return np.asarray(x)  # methods of a subclass may do something else, as matrix.reshape
    view = view_of(x)
    if view is not None:
        return view
    if not isinstance(x, Number) and not _exposes_memory(x):
        lists_too = where == "all_reduce"
        wanted = "an array, a number, or a list of these" if lists_too else "an array or a number"
        method = next((f", such as x.{name}()" for name in _TO_NUMPY if hasattr(x, name)), "")
        raise TypeError(f"{where}: got {shown(x)}; pass {wanted}{method}")
    only_dlpack = hasattr(x, "__dlpack__") and not hasattr(x, "__array__")
    try:
        array: np.ndarray = np.from_dlpack(x) if only_dlpack else np.asarray(x)
    except Exception as error:  # of another library: its text says what it wants
        kind = type(x).__name__
        if outside := next((call for end, call in _OF_TRACED.items() if kind.endswith(end)), ""):
            raise TypeError(
                f"{where}: got a {kind}, which has no elements yet; call it by {outside}"
            ) from None
        raise TypeError(f"{where}: NumPy cannot read the {kind}: {error}") from error
    if array.dtype == object and isinstance(x, int):
        raise TypeError(f"{where}: got an int of more than 64 bits; pass a float")
    return array


_TO_NUMPY = ("to_numpy", "numpy", "toarray")
"""Methods by which objects of other libraries give a NumPy array."""


_OF_TRACED = {
    "Tracer": "jax.experimental.io_callback(..., ordered=True) inside jax.jit",
    "SymbolicTensor": "tf.numpy_function inside tf.function",
}
"""End of the name of a type of arrays that JAX or TensorFlow traces -> what calls on elements."""


def _exposes_memory(x: Any) -> bool:
    names = ("__array_interface__", "__array__", "__dlpack__")
    if any(hasattr(x, name) for name in names):
        return True
    try:
        memoryview(x).release()
    except TypeError:
        return False
    return True


_WANTED = {
    "collective": "the name of a collective, such as 'all_reduce'",
    "op": "the name of an op, such as 'sum'",
    "root": "a rank, a whole number",
    "owner": "a rank, a whole number",
    "algorithm": "the name of an algorithm, or 'auto'",
    "wire": "'bfloat16', 'float16' or None",
}
"""Text of the wanted value, by the name of an argument that selects a call."""

_BEFORE_OUT = ("op", "root")
"""Arguments that take a positional array for the result: they follow the input directly."""


def check_selectors(where: str, **selectors: Any) -> None:
    """Check the types of arguments by which a call is looked up.

    Raises TypeError, which names the argument.
    """
    for name, value in selectors.items():
        if hasattr(value, "__dlpack__"):
            wanted = "name the result with out=" if name in _BEFORE_OUT else f"pass {_WANTED[name]}"
            raise TypeError(f"{where}: {name} is an array; {wanted}")
        if name in ("root", "owner"):
            right = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        else:
            right = isinstance(value, str) or (name == "wire" and value is None)
        if not right:
            wanted = _op_instead(where, name, value) or f"pass {_WANTED[name]}"
            raise TypeError(f"{where}: {name} is {shown(value)}; {wanted}")


def _op_instead(where: str, name: str, value: Any) -> str:
    """Return what to write if `value` stands for an op, and the argument `name` may be one; or "".

    In `reduce` the root stands before the op; in mpi4py the op stands before the root.
    """
    meant = op_meant_by(value)
    if meant and name == "op":
        return f"pass op={meant!r}"
    return f"pass the op by name, op={meant!r}" if meant and where == "reduce" else ""


def reduction(
    where: str, arrays: Iterable[Any], op: Any, algorithm: Any, wire: Any
) -> dict[str, Any]:
    """Return the arguments of a reduction of `arrays` by their names, with `op` as its name.

    Raises TypeError for an array in their place, and for an mpi4py op without a counterpart.
    """
    if type(op) is not str or type(algorithm) is not str or wire is not None:
        op = op_name(where, arrays, op)
        check_selectors(where, op=op, algorithm=algorithm, wire=wire)
    return {"op": op, "algorithm": algorithm, "wire": wire}


def check_out(where: str, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check that `out` is a writeable array of this shape and dtype, whose elements are apart.

    Raises TypeError or ValueError.
    """
    if out.dtype != dtype:
        raise TypeError(f"{where}: out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise ValueError(f"{where}: out has shape {out.shape}, the result has {shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{where}: out is read-only; pass an array that can be written")
    if not out.flags.c_contiguous and _repeats_memory(out):
        raise ValueError(f"{where}: elements of out share memory; pass an array of its own")


_MOST_COMPARED = 1 << 20
"""Elements.  A longer array whose strides do not show that its elements are apart is refused."""


def _repeats_memory(array: Any) -> bool:
    """Return whether elements of an array share memory, as those of `as_strided` may."""
    sides = [side for side in zip(array.strides, array.shape, strict=True) if side[1] > 1]
    extent = array.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in sides):
        if stride < extent:
            break
        extent += stride * (length - 1)
    else:
        return False
    if array.size > _MOST_COMPARED:
        return True
    places: Any = np.zeros(min(array.size, 1), np.int64)
    for stride, length in sides:
        places = np.add.outer(places, np.arange(length) * stride)
    return bool((np.diff(np.sort(places, None)) < array.itemsize).any())


def check_apart(where: str, arrays: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
    """Check that no result overwrites another one, unless they are results of the same array.

    Raises ValueError.
    """
    ends: list[tuple[int, int]] = []
    """End of the memory, and index, of each result that begins before."""
    for begin, end, index in sorted((*_bounds(each), i) for i, each in enumerate(targets)):
        ends = [each for each in ends if each[0] > begin]
        for _, other in ends:
            alike = all(same_memory(each[other], each[index]) for each in (arrays, targets))
            if not alike and _share_memory(targets[other], targets[index]):
                first, second = sorted((other, index))
                raise ValueError(
                    f"{where}: members {first} and {second} of out share memory; "
                    "pass an array of its own for each"
                )
        ends.append((end, index))


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Return the address of the first byte of an array, and that behind its last."""
    if not array.flags.c_contiguous:
        return byte_bounds(array)
    begin = address_of(array)
    return begin, begin + array.nbytes


def same_memory(x: np.ndarray, out: np.ndarray) -> bool:
    """Whether `x` and `out` are the same elements in memory, in the same order."""
    return x is out or (
        x.shape == out.shape
        and x.strides == out.strides
        and x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
    )


def check_overlap(where: str, x: np.ndarray, out: np.ndarray, in_place: bool) -> None:
    """Check that `x` and `out` share no memory.  Raises ValueError, as `overlap_error`."""
    if _share_memory(x, out):
        raise overlap_error(where, in_place)


def overlap_error(where: str, in_place: bool) -> ValueError:
    """Return the error for an `out` that shares memory with the input.

    `in_place`: the collective accepts the input itself as `out`.
    """
    itself = "the input itself as out (in place), or " if in_place else ""
    return ValueError(f"{where}: out overlaps the input; pass {itself}an array of its own")


def _share_memory(x: np.ndarray, out: np.ndarray) -> bool:
    most_work: Any = 100_000  # NumPy takes any number; its stub names two
    try:
        return np.shares_memory(x, out, max_work=most_work)
    except np.exceptions.TooHardError:
        return True


def check_root(where: str, root: int, size: int, name: str = "root") -> None:
    """Check that `root`, a whole number, is a rank.  Raises ValueError, which calls it `name`."""
    if not 0 <= root < size:
        raise ValueError(f"{where}: {name} is {root}; ranks are 0 to {size - 1}")


def as_counts(where: str, counts: Any) -> tuple[int, ...]:
    """Return `counts` as ints.  Raises TypeError unless it has whole numbers alone."""
    try:
        return tuple(map(operator.index, counts))
    except TypeError:
        raise TypeError(
            f"{where}: counts={in_short(counts)}; pass a list of whole numbers, one for each rank"
        ) from None


def _check_room(where: str, what: str, elements: int) -> None:
    if elements >= 1 << 57:  # with 32 bytes each, more than there are addresses
        raise ValueError(f"{where}: {what}; no memory has room for as many elements")


def _check_each(where: str, counts: tuple[int, ...], size: int) -> None:
    if len(counts) != size or any(count < 0 for count in counts):
        raise ValueError(
            f"{where}: counts={counts}; pass one count of at least 0 for each of "
            f"{counted(size, 'rank')}"
        )


def check_counts(
    where: str, array: np.ndarray, counts: tuple[int, ...], rank: int, size: int
) -> None:
    """Check the first dimensions of all ranks, `counts`, and this rank's `array` against them.

    Raises ValueError.
    """
    _check_each(where, counts, size)
    _check_room(where, f"counts={counts}", sum(counts) * prod(array.shape[1:]))
    if counts[rank] != array.shape[0]:
        raise ValueError(
            f"{where}: counts[{rank}] is {counts[rank]}, but this rank passes an array of "
            f"first dimension {array.shape[0]}"
        )


Matrix = tuple[tuple[int, ...], ...]
"""The counts of an all-to-all: row i has what rank i sends to each rank."""


def as_row_or_matrix(where: str, counts: Any) -> tuple[tuple[int, ...], None] | tuple[None, Matrix]:
    """Return the counts of an all-to-all as ints: the row of this rank, or the rows of all ranks.

    Raises TypeError unless `counts` has whole numbers alone.
    """
    try:
        given = counts.tolist() if isinstance(counts, np.ndarray) else list(counts)
        if any(isinstance(each, Iterable) for each in given):
            return None, tuple(tuple(map(operator.index, row)) for row in given)
        return tuple(map(operator.index, given)), None
    except TypeError:
        raise TypeError(
            f"{where}: counts={in_short(counts)}; pass a list of whole numbers, one for each "
            "rank, or one such list of each rank"
        ) from None


def at_least_1d(array: Any) -> Any:
    """View a 0-d array as an array of shape (1,); return any other array itself."""
    return array.reshape(1) if array.ndim == 0 else array


def check_row(where: str, array: np.ndarray, row: tuple[int, ...], size: int) -> None:
    """Check the counts that this rank sends to each rank, and its `array` against them.

    Raises ValueError.
    """
    _check_each(where, row, size)
    if sum(row) != array.shape[0]:
        raise ValueError(
            f"{where}: counts={row} add up to {sum(row)}, but this rank passes an array of "
            f"first dimension {array.shape[0]}"
        )


def check_matrix(where: str, array: np.ndarray, matrix: Matrix, rank: int, size: int) -> None:
    """Check the counts of all ranks, and this rank's `array` against them.  Raises ValueError."""
    if len(matrix) != size or any(
        len(row) != size or any(count < 0 for count in row) for row in matrix
    ):
        raise ValueError(
            f"{where}: counts={matrix}; pass {counted(size, 'row')} of "
            f"{counted(size, 'count')} of at least 0"
        )
    _check_room(where, f"counts={matrix}", sum(map(sum, matrix)) * prod(array.shape[1:]))
    check_row(where, array, matrix[rank], size)


def as_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """Return a dtype, also of ml_dtypes by its name.  Raises TypeError if there is none."""
    try:
        return named_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, AttributeError):
        raise TypeError(
            f"{where}: unknown dtype {shown(dtype)}; pass one such as 'float32'"
        ) from None


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; dtypes of ml_dtypes are included."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


WIRES = ("bfloat16", "float16")
"""The dtypes that data may be rounded to for messages."""


def check_wire(where: str, dtype: np.dtype[Any], wire: Any) -> np.dtype[Any]:
    """Return the dtype of messages.  Raises TypeError or ValueError for a wrong `wire`."""
    if wire is None:
        return dtype
    if wire not in WIRES:
        raise ValueError(
            f"{where}: unknown wire {wire!r}; choose 'bfloat16', 'float16' or None"
            f"{did_you_mean(wire, WIRES, WIRES_ELSEWHERE)}"
        )
    if dtype.char not in "fd":
        raise TypeError(f"{where}: wire={wire!r} is for float32 and float64, not for {dtype}")
    return named_dtype(wire)


def array_text(array: np.ndarray, first: bool = True) -> str:
    """Describe dtype and shape: ``float32[3, 4]``, or ``float32[:, 4]`` if not `first`."""
    if not first and array.ndim:
        return shape_text((":", *array.shape[1:]), array.dtype)
    return shape_text(array.shape, array.dtype)


def shape_text(shape: Iterable[object], dtype: np.dtype[Any]) -> str:
    """Describe dtype and shape: ``float32[3, 4]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def as_shape(where: str, shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple.  Raises ValueError unless it has lengths of at least 0."""
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise ValueError(f"{where}: shape is {in_short(shape)}; pass lengths of at least 0")
    _check_room(where, f"shape is {in_short(shape)}", prod(size or 1 for size in sizes))
    return sizes


def as_host_out(where: str, out: Any) -> np.ndarray:
    """View `out` as a NumPy array without a copy.  Raises TypeError if it exposes no memory."""
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{where}: out is a masked array; pass out.data")
    if isinstance(out, np.ndarray):
        return np.asarray(out)  # as `as_array`
    view = view_of(out)
    if view is not None:
        return view
    if not hasattr(out, "__dlpack__"):
        raise TypeError(f"{where}: out is {shown(out)}; pass a NumPy array")
    kind = type(out).__name__
    try:
        array = np.from_dlpack(out)
    except Exception as error:  # of another library: its text says what it wants
        raise TypeError(f"{where}: NumPy cannot write to out, a {kind}: {error}") from error
    if is_tensor(out):  # DLPack shows memory that holds other values
        text = "its memory does not hold its elements"
        raise TypeError(f"{where}: NumPy cannot write to out, a {kind}: {text}")
    return array
