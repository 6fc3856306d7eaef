"""The mesh: which ranks form a group, in every dimension and on several nodes; and misuse."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.parallel.mesh import Coordinates, fits, in_order
from ringreduce.train import Mesh

MESHES = [sizes for ranks in (1, 2, 4, 6, 8) for sizes in fits(ranks)]


def place(comm, sizes):
    """The coordinates of this rank, and the ranks of each of its groups."""
    with Mesh(comm, *sizes) as mesh:
        groups = [
            part.all_gather(comm.rank).tolist() for part in (mesh.data, mesh.pipeline, mesh.tensor)
        ]
        ranks = mesh.data.rank, mesh.pipeline.rank, mesh.tensor.rank
        return mesh.coordinates, Coordinates(*groups), ranks


@functools.cache
def places(sizes):
    """Return the results of `place` on all ranks."""
    return rr.spawn(place, math.prod(sizes), sizes)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_group_has_the_ranks_that_differ_in_its_dimension_alone(sizes):
    found = places(sizes)
    rank_at = {at: rank for rank, (at, _, _) in enumerate(found)}
    for at, groups, _ in found:
        for name, size in sizes._asdict().items():
            wanted = [rank_at[at._replace(**{name: i})] for i in range(size)]
            assert getattr(groups, name) == wanted


@pytest.mark.few(9)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_the_rank_in_a_group_is_the_coordinate(sizes):
    assert all(at == ranks for at, _, ranks in places(sizes))


def test_tensor_is_innermost_then_data_then_pipeline():
    found = rr.spawn(place, 8, Coordinates(2, 2, 2))
    assert found[0][1] == Coordinates(data=[0, 2], pipeline=[0, 4], tensor=[0, 1])


@pytest.mark.parametrize("nodes", [((0, 2), (1, 3)), ((3, 0, 1, 2), (4, 5)), (4, 2, 2), (2, 6)])
def test_a_tensor_group_is_inside_a_node_if_the_sizes_allow(nodes):
    def program(comm):
        with Mesh(comm, data=comm.size // 2, tensor=2) as mesh:
            return len(mesh.tensor.nodes)

    ranks = sum(node if isinstance(node, int) else len(node) for node in nodes)
    assert rr.spawn(program, ranks, nodes=nodes) == [1] * ranks


def test_as_few_tensor_groups_as_possible_cross_nodes():
    def program(comm):
        with Mesh(comm, data=4, tensor=2) as mesh:
            return len(mesh.tensor.nodes)

    assert sorted(rr.spawn(program, 8, nodes=(3, 5))) == [1] * 6 + [2] * 2


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
def test_the_order_has_every_rank_once(tensor):
    assert sorted(in_order([(0, 3, 5), (1, 2), (4, 6, 7)], tensor)) == list(range(8))


@pytest.mark.parametrize(
    ("sizes", "splits"), [((4, 1, 1), 2), ((1, 1, 4), 2), ((2, 2, 1), 3), ((1, 1, 1), 1)]
)
def test_dimensions_of_one_share_a_communicator(monkeypatch, sizes, splits):
    made = []
    split = rr.Communicator.split
    monkeypatch.setattr(
        rr.Communicator, "split", lambda comm, *how: made.append(comm.rank) or split(comm, *how)
    )
    ranks = math.prod(sizes)
    rr.spawn(place, ranks, Coordinates(*sizes))
    assert made.count(0) == splits


def test_a_dimension_of_one_computes():
    def program(comm):
        with Mesh(comm, tensor=2) as mesh:
            return mesh.data.all_reduce(np.array([comm.rank + 1.0])).tolist()

    assert rr.spawn(program, 2) == [[1.0], [2.0]]


def test_the_end_of_the_block_closes_the_groups_and_not_the_communicator():
    def program(comm):
        with Mesh(comm, data=2, pipeline=2) as mesh:
            pass
        for part in (mesh.data, mesh.pipeline, mesh.tensor):
            with pytest.raises(ValueError, match="closed"):
                part.all_reduce(1)
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 4) == [4] * 4


def test_a_mesh_shows_its_place():
    def program(comm):
        with Mesh(comm, data=2) as mesh:
            return repr(mesh)

    wanted = "<ringreduce.train.Mesh: data 1 of 2, pipeline 0 of 1, tensor 0 of 1>"
    assert rr.spawn(program, 2)[1] == wanted


# --- misuse ---------------------------------------------------------------------------------------


def error_of(ranks, *sizes):
    def program(comm):
        with pytest.raises(ValueError, match="Mesh: ") as error:
            Mesh(comm, *sizes)
        return str(error.value)

    return rr.spawn(program, ranks)[0]


def test_another_product_lists_the_meshes_that_fit():
    assert error_of(4, 3, 1, 1) == (
        "Mesh: data=3, pipeline=1, tensor=1 have the product 3, the communicator has 4 ranks; pass "
        "one of (data, pipeline, tensor) = (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4), "
        "(1, 2, 2)"
    )


def test_many_meshes_are_counted_and_the_nearest_is_first():
    text = error_of(24, 1, 1, 8)
    assert "tensor) = (3, 1, 8), (1, 3, 8), (1, 1, 24), " in text
    assert text.endswith(" or one of 18 more")


def test_ranks_that_pass_different_sizes_all_raise():
    def program(comm):
        sizes = (1, 2, 1) if comm.rank == 1 else (2, 1, 1)
        with pytest.raises(rr.MismatchError, match=r"rank 1 passes .* = \(1, 2, 1\), rank 0"):
            Mesh(comm, *sizes)
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 2) == [2, 2]
