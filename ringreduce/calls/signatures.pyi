"""The collectives as editors and type checkers see them: what a call returns for its arguments.

`collectives.py` has their code.  A test compares the parameters.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ringreduce.calls import collectives
from ringreduce.calls.work import Work

# Editors complete the names.
_Op: TypeAlias = Literal["sum", "mean", "min", "max", "prod", "and", "or", "xor"] | str | MPI.Op
_Wire: TypeAlias = Literal["bfloat16", "float16"] | str | None
_S = TypeVar("_S", bound=np.generic)
_Shape = TypeVar("_Shape", bound=tuple[Any, ...])
_Out = TypeVar("_Out", bound=np.ndarray[Any, Any] | list[Any] | tuple[Any, ...])
_Flat: TypeAlias = np.ndarray[tuple[int], np.dtype[_S]]
_Number: TypeAlias = np.ndarray[tuple[()], np.dtype[Any]]
_Arrays: TypeAlias = list[NDArray[_S]] | tuple[NDArray[_S], ...]

class Collectives(collectives.Collectives):
    """What `Communicator` inherits, for type checkers."""

    @overload
    def all_reduce(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> np.ndarray[_Shape, np.dtype[_S]]: ...
    @overload
    def all_reduce(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[np.ndarray[_Shape, np.dtype[_S]]]: ...
    @overload
    def all_reduce(
        self,
        x: _Arrays[_S],
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> list[NDArray[_S]]: ...
    @overload
    def all_reduce(
        self,
        x: _Arrays[_S],
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[list[NDArray[_S]]]: ...
    @overload
    def all_reduce(
        self,
        x: complex | np.generic,
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Number: ...
    @overload
    def all_reduce(
        self,
        x: Any,
        op: _Op = ...,
        *,
        out: _Out,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def all_reduce(
        self,
        x: Any,
        op: _Op = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def all_reduce(
        self,
        x: Any,
        op: _Op = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def reduce_scatter(
        self,
        x: NDArray[_S],
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Flat[_S]: ...
    @overload
    def reduce_scatter(
        self,
        x: NDArray[_S],
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[_Flat[_S]]: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        op: _Op = ...,
        *,
        out: _Out,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        op: _Op = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def reduce_scatter(
        self,
        x: Any,
        op: _Op = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def reduce(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        root: int = ...,
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> np.ndarray[_Shape, np.dtype[_S]] | None: ...
    @overload
    def reduce(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        root: int = ...,
        op: _Op = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[np.ndarray[_Shape, np.dtype[_S]] | None]: ...
    @overload
    def reduce(
        self,
        x: Any,
        root: int = ...,
        op: _Op = ...,
        *,
        out: _Out,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def reduce(
        self,
        x: Any,
        root: int = ...,
        op: _Op = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def reduce(
        self,
        x: Any,
        root: int = ...,
        op: _Op = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        wire: _Wire = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def broadcast(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        root: int = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> np.ndarray[_Shape, np.dtype[_S]]: ...
    @overload
    def broadcast(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        root: int = ...,
        *,
        out: None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[np.ndarray[_Shape, np.dtype[_S]]]: ...
    @overload
    def broadcast(
        self,
        x: Any,
        root: int = ...,
        *,
        out: _Out,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def broadcast(
        self,
        x: Any,
        root: int = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def broadcast(
        self,
        x: Any,
        root: int = ...,
        *,
        out: Any = ...,
        algorithm: str = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def all_gather(
        self,
        x: NDArray[_S],
        *,
        out: None = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> NDArray[_S]: ...
    @overload
    def all_gather(
        self,
        x: NDArray[_S],
        *,
        out: None = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[NDArray[_S]]: ...
    @overload
    def all_gather(
        self,
        x: Any,
        *,
        out: _Out,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def all_gather(
        self,
        x: Any,
        *,
        out: Any = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def all_gather(
        self,
        x: Any,
        *,
        out: Any = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def gather(
        self,
        x: NDArray[_S],
        root: int = ...,
        *,
        out: None = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> NDArray[_S] | None: ...
    @overload
    def gather(
        self,
        x: NDArray[_S],
        root: int = ...,
        *,
        out: None = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[NDArray[_S] | None]: ...
    @overload
    def gather(
        self,
        x: Any,
        root: int = ...,
        *,
        out: _Out,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def gather(
        self,
        x: Any,
        root: int = ...,
        *,
        out: Any = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def gather(
        self,
        x: Any,
        root: int = ...,
        *,
        out: Any = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def scatter(
        self,
        x: NDArray[_S] | None,
        root: int = ...,
        *,
        out: None = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> NDArray[_S]: ...
    @overload
    def scatter(
        self,
        x: NDArray[_S] | None,
        root: int = ...,
        *,
        out: None = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[NDArray[_S]]: ...
    @overload
    def scatter(
        self,
        x: Any,
        root: int = ...,
        *,
        out: _Out,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def scatter(
        self,
        x: Any,
        root: int = ...,
        *,
        out: Any = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def scatter(
        self,
        x: Any,
        root: int = ...,
        *,
        out: Any = ...,
        counts: Sequence[int] | None = ...,
        algorithm: str = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def all_to_all(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        *,
        out: None = ...,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> np.ndarray[_Shape, np.dtype[_S]]: ...
    @overload
    def all_to_all(
        self,
        x: np.ndarray[_Shape, np.dtype[_S]],
        *,
        out: None = ...,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[np.ndarray[_Shape, np.dtype[_S]]]: ...
    @overload
    def all_to_all(
        self,
        x: Any,
        *,
        out: _Out,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        algorithm: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> _Out: ...
    @overload
    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = ...,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        algorithm: str = ...,
        async_op: Literal[True],
        timeout_s: float | None = ...,
    ) -> Work[Any]: ...
    @overload
    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = ...,
        counts: Sequence[int] | Sequence[Sequence[int]] | None = ...,
        algorithm: str = ...,
        async_op: bool = ...,
        timeout_s: float | None = ...,
    ) -> Any: ...
    @overload
    def barrier(self, *, async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], timeout_s: float | None = ...) -> Work[None]: ...
    @overload
    def barrier(self, *, async_op: bool = ..., timeout_s: float | None = ...) -> Any: ...
