"""Divide the ranks of a communicator by three dimensions: data, pipeline and tensor.

Ranks are put in the order of their nodes.  Tensor is the innermost dimension, so a tensor group has
neighbouring ranks: its all-reduces stand between the layers of forward and backward, where no
computation hides them.  Data comes next.  Pipeline is the outermost dimension and the first to
cross nodes: a stage sends only the activations of a microbatch, to one rank.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", SC 2021, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr
from ringreduce.errors import counted, shown

_MOST_LISTED = 12


class Coordinates(NamedTuple):
    """One number for each dimension: the place of a rank, or the sizes of a mesh."""

    data: int
    pipeline: int
    tensor: int


class Mesh:
    """The ranks of a communicator, divided by three dimensions.

    A dimension's communicator has the ranks that differ in this dimension alone.  Its rank is this
    rank's coordinate.

    Ranks are in the order of their nodes: tensor is the innermost dimension, then data, then
    pipeline.  A tensor group is inside one node if the size of every node is a multiple of
    `tensor`.  Otherwise as many groups as possible are inside one node, and the ranks that are left
    form the last groups.

    Collective: every rank must pass the same sizes.  The mesh is a context manager: at the end of
    the ``with`` block its communicators are closed.

    Args:
        comm: the communicator to divide.
        data: the number of replicas of the model.
        pipeline: the number of ranks that hold the stages of a replica.
        tensor: the number of ranks that hold a stage's layers together.

    Attributes:
        data, pipeline, tensor: the `Communicator` of this rank's group in each dimension.
            Dimensions of size 1 share a communicator of this rank alone.
        coordinates: this rank's place, a named tuple of the ints `data`, `pipeline` and `tensor`.

    Raises:
        ValueError: a size is no int of at least 1; or their product is not the number of ranks.
            The text lists the meshes that fit.
        MismatchError: ranks pass different sizes.

    Example:
        >>> def program(comm):
        ...     with rr.train.Mesh(comm, data=2, tensor=2) as mesh:
        ...         ranks = mesh.tensor.all_gather(comm.rank), mesh.data.all_gather(comm.rank)
        ...         return *mesh.coordinates, *(part.tolist() for part in ranks)
        >>> for found in rr.spawn(program, 4):
        ...     print(found)
        (0, 0, 0, [0, 1], [0, 2])
        (0, 0, 1, [0, 1], [1, 3])
        (1, 0, 0, [2, 3], [0, 2])
        (1, 0, 1, [2, 3], [1, 3])
    """

    __module__ = "ringreduce.train"

    def __init__(
        self, comm: rr.Communicator, data: int = 1, pipeline: int = 1, tensor: int = 1
    ) -> None:
        sizes = Coordinates(data, pipeline, tensor)
        check_fits(sizes, comm.size)
        _check_alike(comm, sizes)
        order = in_order(comm.nodes, tensor)
        position = order.index(comm.rank)
        self.coordinates = coordinates(position, sizes)
        with ExitStack() as stack:
            alone = None
            if 1 in sizes:
                alone = stack.enter_context(_split(comm, comm.rank, 0))
            parts = []
            for own, size in enumerate(sizes):
                if size == 1:
                    assert alone is not None
                    parts.append(alone)
                    continue
                others = [each for i, each in enumerate(self.coordinates) if i != own]
                group = others[0] * comm.size + others[1]
                parts.append(stack.enter_context(_split(comm, group, position)))
            self._open = stack.pop_all()
        self.data, self.pipeline, self.tensor = parts

    def __repr__(self) -> str:
        parts = zip(self.coordinates._asdict().items(), self._parts(), strict=True)
        places = [f"{name} {at} of {part.size}" for (name, at), part in parts]
        return f"<ringreduce.train.Mesh: {', '.join(places)}>"

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def close(self) -> None:
        """Close the communicators of the mesh.  Collective.

        The communicator that was divided stays open.

        Raises:
            MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.close`.

        Example:
            >>> def program(comm):
            ...     mesh = rr.train.Mesh(comm, data=2)
            ...     mesh.close()
            ...     return str(mesh.data), comm.all_reduce(1).item()
            >>> rr.spawn(program, 2)[0]
            ('<ringreduce.Communicator: rank 0 of 2, node (0, 1), among threads, closed>', 2)
        """
        self._open.close()

    def _parts(self) -> tuple[rr.Communicator, rr.Communicator, rr.Communicator]:
        return self.data, self.pipeline, self.tensor


def in_order(nodes: Sequence[Sequence[int]], tensor: int) -> list[int]:
    """Return all ranks, so that each `tensor` in turn form a group, inside a node where they can.

    >>> in_order([(0, 1, 2), (3, 4, 5)], tensor=2)
    [0, 1, 3, 4, 2, 5]
    """
    whole: list[int] = []
    rest: list[int] = []
    for node in nodes:
        end = len(node) - len(node) % tensor
        whole += node[:end]
        rest += node[end:]
    return whole + rest


def coordinates(position: int, sizes: Coordinates) -> Coordinates:
    """Return the coordinates of a position in the order of `in_order`.

    >>> coordinates(3, Coordinates(data=2, pipeline=2, tensor=2))
    Coordinates(data=1, pipeline=0, tensor=1)
    """
    rest, tensor = divmod(position, sizes.tensor)
    pipeline, data = divmod(rest, sizes.data)
    return Coordinates(data, pipeline, tensor)


def check_fits(sizes: Coordinates, ranks: int) -> None:
    """Raise ValueError unless `sizes` are ints of at least 1 whose product is `ranks`."""
    for name, size in sizes._asdict().items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"Mesh: {name} is {shown(size)}; pass an int of at least 1")
    if math.prod(sizes) == ranks:
        return
    # Those that change the fewest sizes come first.
    fitting = sorted(fits(ranks), key=lambda each: sum(map(int.__ne__, each, sizes)))
    listed = ", ".join(str(tuple(each)) for each in fitting[:_MOST_LISTED])
    more = len(fitting) - _MOST_LISTED
    given = ", ".join(f"{name}={size}" for name, size in sizes._asdict().items())
    raise ValueError(
        f"Mesh: {given} have the product {math.prod(sizes)}, the communicator has "
        f"{counted(ranks, 'rank')}; pass one of (data, pipeline, tensor) = {listed}"
        + f" or one of {more} more"
        * (more > 0)
    )


def fits(ranks: int) -> list[Coordinates]:
    """Return the sizes of every mesh of `ranks` ranks.

    >>> [tuple(sizes) for sizes in fits(3)]
    [(3, 1, 1), (1, 3, 1), (1, 1, 3)]
    """
    return [
        Coordinates(data, pipeline, ranks // data // pipeline)
        for data in _divisors(ranks)
        for pipeline in _divisors(ranks // data)
    ]


# --- implementation -------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [each for each in range(number, 0, -1) if number % each == 0]


def _split(comm: rr.Communicator, group: int, position: int) -> rr.Communicator:
    part = comm.split(group, position)
    assert part is not None
    return part


def _check_alike(comm: rr.Communicator, sizes: Coordinates) -> None:
    of_ranks = comm.all_gather(np.array([sizes])).tolist()
    for rank, each in enumerate(of_ranks):
        if each != of_ranks[0]:
            theirs, wanted = (tuple(passed) for passed in (each, of_ranks[0]))
            raise rr.MismatchError(
                f"Mesh: rank {rank} passes (data, pipeline, tensor) = {theirs}, rank 0 passes "
                f"{wanted}; every rank must pass the same sizes"
            )
