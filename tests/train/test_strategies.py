"""Strategies: every one trains as one process does, and those that cannot are refused."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.launch import cli
from ringreduce.parallel.mesh import fits
from ringreduce.train import DriftError, Settings, Split, StoreStats, Trainer, load_split, mlp
from ringreduce.train.configuration import read
from ringreduce.train.strategies import (
    PIPELINES,
    STRATEGIES,
    CentralStorage,
    Hybrid,
    LocalSGD,
    Mirrored,
    MultiWorkerMirrored,
    OneDevice,
    ParameterServer,
    Pipeline,
    Tensor,
    Zero,
    by_name,
    table,
    to_plain,
)
from tests.support.rounding import rounding_bounds

STEPS = 8
SMALL = Settings(
    epochs=1, hidden=(12, 9, 7), batch=50, dtype="float64", lr=0.02, check_every=3, noise=0.1
)


@cache
def digits() -> Split:
    """Some of the digits: an epoch of SMALL has four steps, the last on fewer samples."""
    split = load_split(np.float64)
    return replace(split, train_x=split.train_x[:190], train_labels=split.train_labels[:190])


# --- one process ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A network, its data, and its settings: 8 steps, the last of each epoch on fewer samples."""

    inputs: int
    hidden: tuple[int, ...]
    classes: int
    batch: int
    last: int
    """Samples of the last batch of an epoch."""
    optimizer: str
    clip: float
    seed: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.inputs, *self.hidden, self.classes)

    @property
    def settings(self) -> Settings:
        return Settings(
            hidden=self.hidden,
            batch=self.batch,
            optimizer=self.optimizer,
            clip=self.clip,
            seed=self.seed,
            epochs=STEPS // 4,
            dtype="float64",
            lr=0.05 if self.optimizer == "sgd" else 0.005,
            check_every=3,
            first_bucket_bytes=200,
            bucket_bytes=500,
        )

    @property
    def split(self) -> Split:
        rng = np.random.default_rng(self.seed)
        samples = 3 * self.batch + self.last
        x = rng.normal(size=(samples + 11, self.inputs))
        labels = rng.integers(0, self.classes, samples + 11)
        return Split("random", x[11:], labels[11:], x[:11], labels[:11], self.classes)


def parameters_of(comm, problem, strategy):
    result = rr.train.train(comm, problem.split, problem.settings, strategy=strategy)
    return result.parameters, result.digest


def shaken(comm, problem, bounds, seed):
    """Train alone, with gradients that are off by up to twice their `bounds` in every step."""
    trainer = Trainer(comm, problem.split, problem.settings)
    part, rng = trainer._part, np.random.default_rng(seed)
    update = part.update

    def shake(lr, step):
        for name, gradient in part.reduced().items():
            # A sum of zeros is exact.
            gradient += rng.uniform(-2, 2, gradient.shape) * bounds[name] * (gradient != 0)
        update(lr, step)

    part.update = shake
    return trainer.run().parameters


@cache
def alone_and_limit(problem: Problem, summands: int) -> tuple[np.ndarray, float]:
    """Return the parameters of one process, and how far those of several may be from them.

    Every gradient is off by at most E, its bound on the first batch, in one process and in
    several.  What such errors do to the parameters is measured: in three runs of one process the
    gradients of each step are off by random numbers up to 2 E.  Errors are larger on some other
    batch, and need not be the worst in three runs: a factor of 10 allows for both.
    """
    sizes, given = problem.sizes, problem.settings
    start = mlp.views(mlp.init_params(sizes, given.seed, np.float64), sizes)
    x, labels = problem.split.train_x[: problem.batch], problem.split.train_labels[: problem.batch]
    _, flat = rounding_bounds(start, x, labels, problem.batch, summands)
    bounds = mlp.named(mlp.views(flat, sizes))
    ((alone, _),) = rr.spawn(parameters_of, 1, problem, OneDevice())
    runs = [rr.spawn(shaken, 1, problem, bounds, seed)[0] for seed in range(3)]
    return alone, 10 * max(np.linalg.norm(run - alone) for run in runs)


def check(comm_results, problem: Problem, summands: int) -> None:
    """Check that all ranks have the same parameters, which are those of one process."""
    alone, limit = alone_and_limit(problem, summands)
    assert len({digest for _, digest in comm_results}) == 1
    assert np.linalg.norm(comm_results[0][0] - alone) <= limit < 1e-6 * np.linalg.norm(alone)


# --- every mesh is one process --------------------------------------------------------------------


@st.composite
def problems(draw, layers: int) -> Problem:
    widths = st.integers(1, 9)
    batch = draw(st.integers(3, 20))
    return Problem(
        inputs=draw(widths),
        hidden=tuple(draw(st.lists(widths, min_size=layers - 1, max_size=layers + 1))),
        classes=draw(st.integers(2, 9)),
        batch=batch,
        last=draw(st.integers(1, batch)),
        optimizer=draw(st.sampled_from(["sgd", "adam"])),
        clip=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def meshes(draw) -> tuple[Hybrid, Problem]:
    ranks = draw(st.integers(1, 8))
    data, pipeline, tensor = draw(st.sampled_from(fits(ranks)))
    schedule = draw(st.sampled_from(PIPELINES))
    numbers = [pipeline, 2 * pipeline] if schedule == "interleaved" else [1, 2, 3, 5]
    problem = draw(problems(pipeline))
    rows = -(-problem.batch // data)
    splits = draw(st.sampled_from([None, *(each for each in numbers if each <= rows)]))
    return Hybrid(data, pipeline, tensor, splits=splits, schedule=schedule), problem


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(meshes())
def test_any_mesh_computes_what_one_process_computes(given):
    strategy, problem = given
    ranks = strategy.data * strategy.pipeline * strategy.tensor
    summands = ranks * (strategy.splits or strategy.pipeline)
    check(rr.spawn(parameters_of, ranks, problem, strategy), problem, summands)


ONE = Problem(7, (6, 8, 5), 4, 17, 5, "adam", 0.5, 3)
OTHERS = [
    (MultiWorkerMirrored("hierarchical"), 4),
    (MultiWorkerMirrored("ring"), 3),
    (Mirrored("reduce_to_one"), 3),
    (Mirrored("hierarchical"), 3),
    (Mirrored("two_shot"), 5),
    (CentralStorage(), 3),
    (Zero(1), 3),
    (Zero(2), 5),
    (Zero(3), 4),
    (Pipeline(splits=4, schedule="interleaved", virtual=2), 2),
    (Pipeline(split_size=3, schedule="zero_bubble"), 3),
    (Pipeline(splits=2, cut=(1, 2, 1)), 3),
    (Tensor(), 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), OTHERS, ids=str)
def test_any_strategy_computes_what_one_process_computes(strategy, ranks):
    check(rr.spawn(parameters_of, ranks, ONE, strategy), ONE, 20)


UNBOUND = ParameterServer(servers=2, staleness=None)
OF_FOUR = [Hybrid(*sizes) for sizes in fits(4)]


def over_mpi():
    """The parameters and digests of each mesh of 4 ranks, and of the other strategies."""
    with rr.init() as comm:
        found = [parameters_of(comm, ONE, strategy) for strategy in OF_FOUR]
        found += [parameters_of(comm, ONE, Zero(stage)) for stage in (1, 2, 3)]
        found.append(parameters_of(comm, ONE, CentralStorage()))
        return [(parameters.tolist(), digest) for parameters, digest in found]


@pytest.mark.long
@pytest.mark.mpi
def test_meshes_of_four_ranks_compute_what_one_process_computes_over_mpi(mpi):
    ranks = mpi.run_ok("call", 4, "tests.train.test_strategies:over_mpi")
    assert len(ranks[0]) == len(OF_FOUR) + 4
    for results in zip(*ranks, strict=True):
        check([(np.array(parameters), digest) for parameters, digest in results], ONE, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [Mirrored(), CentralStorage(), Zero(3), Tensor(), Pipeline(1)], ids=str
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_normalise_have_the_loss_of_one(strategy, ranks):
    chosen, split = replace(SMALL, batch_norm=True, clip=0.3), digits()

    def program(comm, strategy):
        result = rr.train.train(comm, split, chosen, strategy=strategy)
        return result.loss, result.accuracy

    ((loss, accuracy),) = rr.spawn(program, 1, OneDevice())
    for theirs in rr.spawn(program, ranks, strategy):
        assert theirs == (pytest.approx(loss, rel=1e-9), accuracy)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "two_shot"])
@pytest.mark.parametrize("strategy", [Zero(1), Zero(2), CentralStorage()], ids=str)
def test_halves_of_an_all_reduce_have_its_bits(strategy, algorithm):
    chosen = replace(SMALL, algorithm=algorithm, optimizer="adam", clip=0.05)
    split, config = digits(), rr.Config(slice_bytes=4096)  # several slices a bucket

    def program(comm, strategy):
        return rr.train.train(comm, split, chosen, strategy=strategy).digest

    digests = {
        digest
        for each in (strategy, Mirrored())
        for digest in rr.spawn(program, 3, each, config=config)
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_a_checkpoint_of_one_strategy_goes_on_under_another():
    split, chosen = digits(), replace(SMALL, lr_schedule="constant")
    of_epoch = Trainer.epoch_steps.fget

    def program(comm, strategies):
        arrays = state = None
        for epoch, strategy in enumerate(strategies, 1):
            trainer = Trainer(comm, split, replace(chosen, epochs=epoch), strategy=strategy)
            if state is not None:
                trainer.restore(arrays if comm.rank == 0 else None, state)
            result = trainer.run()
            arrays, state = trainer.arrays(), trainer.state
            assert state.step == epoch * of_epoch(trainer)
        return result.parameters

    chain = [Mirrored(), Zero(3), ParameterServer(), Pipeline(splits=3), Mirrored()]
    mixed = rr.spawn(program, 2, chain)
    (alone,) = rr.spawn(program, 1, [OneDevice()] * 5)
    assert np.linalg.norm(mixed[0] - alone) <= 1e-11 * np.linalg.norm(alone)


# --- parameter servers ----------------------------------------------------------------------------


def outcome(comm, strategy, split, chosen):
    result = rr.train.train(comm, split, chosen, strategy=strategy)
    return result.parameters, result.digest, result.loss, result.accuracy


def few(samples: int) -> Split:
    split = digits()
    return replace(
        split, train_x=split.train_x[:samples], train_labels=split.train_labels[:samples]
    )


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd", 0.9), ("adam", 0.9)])
def test_steps_of_a_server_compute_what_one_process_computes(optimizer, momentum, servers):
    # The last batch of an epoch has two samples: two of four workers have none.
    chosen = replace(SMALL, epochs=2, optimizer=optimizer, momentum=momentum, weight_decay=0.1)
    ((alone, _, loss, accuracy),) = rr.spawn(outcome, 1, OneDevice(), few(152), chosen)
    results = rr.spawn(outcome, 4 + servers, ParameterServer(servers), few(152), chosen)
    assert len({digest for _, digest, _, _ in results}) == 1
    assert np.linalg.norm(results[0][0] - alone) <= 1e-10 * np.linalg.norm(alone)
    for _, _, *theirs in results:
        assert theirs == [pytest.approx(loss, rel=1e-10), accuracy]


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServer(backup_workers=1),
        ParameterServer(staleness=2, servers=2),
        ParameterServer(staleness=None),
    ],
    ids=str,
)
def test_workers_that_do_not_wait_for_all_learn(strategy):
    chosen = Settings(epochs=3, hidden=(16,), batch=64)
    results = rr.spawn(outcome, 4 + strategy.servers, strategy, rr.train.load(chosen), chosen)
    assert len({digest for _, digest, _, _ in results}) == 1
    assert min(accuracy for *_, accuracy in results) > 0.8


def test_the_learning_rate_of_a_batch_is_divided_by_one_and_the_staleness_of_its_push():
    chosen = replace(SMALL, momentum=0.0, lr_schedule="linear")

    def program(comm):
        trainer = Trainer(comm, digits(), chosen, strategy=ParameterServer(staleness=None))
        trainer.run()
        if comm.rank < 2:
            return None
        part, w = trainer._part, np.zeros(1)
        part.store = SimpleNamespace(meeting=1, stats=StoreStats())
        part._change(w, (np.zeros(1),), np.ones(1), staleness=3, number=5)
        return w.item()

    # Number 5 of two workers is of batch 2 of 4.
    assert rr.spawn(program, 3)[2] == pytest.approx(-chosen.lr * (2 / 4) / (1 + 3))


@pytest.mark.parametrize("times", [1, 2])
def test_servers_go_on_in_the_middle_of_an_epoch(times):
    chosen, saved = replace(SMALL, epochs=2, optimizer="adam"), []

    def save(trainer):
        arrays = {name: array.copy() for name, array in trainer.arrays().items()}
        saved.append((arrays, trainer.state))

    def program(comm, strategy, begin):
        trainer = Trainer(comm, digits(), chosen, strategy=strategy)
        for _ in range(times):
            if begin is not None:
                trainer.restore(*begin)
            result = trainer.run(save=save, save_every=2)
        return result.parameters, result.loss

    ((alone, loss),) = rr.spawn(program, 1, OneDevice(), None)
    begin, last = saved[0], saved[-1]
    assert begin[1].step == 2
    (theirs, their_loss), *_ = rr.spawn(program, 3, ParameterServer(), begin)
    assert np.linalg.norm(theirs - alone) <= 1e-10 * np.linalg.norm(alone)
    assert their_loss == pytest.approx(loss, rel=1e-10)
    assert (saved[-1][1].step, saved[-1][0].keys()) == (last[1].step, last[0].keys())


def test_an_epoch_has_the_staleness_of_its_pushes():
    def program(comm):
        trainer = Trainer(comm, digits(), replace(SMALL, epochs=2), strategy=UNBOUND)
        counts, told = [Counter()], []

        def epoch(epoch):
            counts.append(Counter(trainer.pushes.staleness))
            told.append((epoch.staleness_mean, epoch.staleness_max))

        trainer.run([SimpleNamespace(steps=id, epoch=epoch)])
        pushes = [list((after - before).elements()) for before, after in pairwise(counts)]
        return told, [(np.mean(each), max(each)) if each else (None, None) for each in pushes]

    told, wanted = rr.spawn(program, 4)[0]
    assert told == wanted
    assert len(told) == 2


def test_the_first_step_with_servers_is_not_in_the_mean_step():
    def program(comm):
        trainer = Trainer(comm, digits(), replace(SMALL, epochs=1), strategy=ParameterServer())
        result = trainer.run()
        return trainer.times[:, 0].tolist(), trainer.times[1, 1], result.step_s

    *workers, _ = rr.spawn(program, 3)
    (made, seconds, step_s), *_ = workers  # the figures are the lowest worker's
    assert step_s == pytest.approx(seconds / made[1])
    # A worker that has got no number has no first step.
    assert {tuple(made) for made, *_ in workers} in ({(1, 3)}, {(1, 3), (0, 4)})


def test_a_worker_makes_no_steps_alone():
    def program(comm):
        trainer = Trainer(comm, digits(), SMALL, strategy=ParameterServer())
        with pytest.raises(ValueError, match=r"makes steps in Trainer\.run alone"):
            trainer.time_steps(1)

    rr.spawn(program, 2)


class Seen:
    """Keeps the numbers of the epochs that it has received."""

    def __init__(self):
        self.epochs = []

    def steps(self, steps):
        pass

    def epoch(self, epoch):
        self.epochs.append(epoch.epoch)


@pytest.mark.parametrize(("lost", "epoch"), [(0, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("staleness", [0, 1, None])
def test_a_lost_rank_costs_nothing_and_the_lowest_worker_that_lives_reports(staleness, lost, epoch):
    chosen, has_left, found = replace(SMALL, epochs=3), threading.Event(), {}

    def program(comm):
        strategy = ParameterServer(2, replicas=2, staleness=staleness)
        trainer = Trainer(comm, digits(), chosen, strategy=strategy)
        part, calls, seen = trainer._part, [], Seen()
        compute, change = part.gradients, part._change

        def change_or_leave(*of_piece):
            if comm.rank == lost and part.store.meeting == 3:  # the second one is of the report
                raise KeyError("gone")
            change(*of_piece)

        def compute_or_leave(*batch):
            calls.append(len(batch))
            if comm.rank == lost:
                raise KeyError("gone")
            if len(calls) == 2 and epoch == 1:
                assert has_left.wait(60)
            return compute(*batch)

        part.gradients, part._change = compute_or_leave, change_or_leave
        try:
            result = trainer.run([seen])
        except KeyError:
            comm.leave("the disk is full")
            has_left.set()
            raise
        comm.leave("it is over")
        found[comm.rank] = result.digest, seen.epochs, result.lost

    with pytest.raises(KeyError, match="gone"):
        rr.spawn(program, 5, timeout_s=120)
    digests, epochs, losses = zip(*(found[rank] for rank in sorted(found)), strict=True)
    assert len(set(digests)) == 1
    assert list(epochs) == [[1, 2, 3], [], [], []]
    assert losses == (((lost, epoch),),) * 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_infinite_loss_of_one_worker_ends_all_ranks_with_one_text(staleness):
    def program(comm):
        strategy = ParameterServer(2, staleness=staleness)
        trainer = Trainer(comm, digits(), SMALL, strategy=strategy)
        compute = trainer._part.gradients
        if comm.rank == 1:
            trainer._part.gradients = lambda x, *more: compute(x * np.inf, *more)
        with pytest.raises(FloatingPointError, match=r"on worker . in step 4, epoch 1") as error:
            trainer.run()
        return str(error.value)

    assert len(set(rr.spawn(program, 5))) == 1


# --- what it costs --------------------------------------------------------------------------------


def costs(strategy, ranks, **changes):
    split, chosen = digits(), replace(SMALL, **changes)

    def program(comm):
        result = rr.train.train(comm, split, chosen, strategy=strategy)
        return result.sent_bytes, result.held_bytes

    return rr.spawn(program, ranks)


BYTES = 8 * mlp.parameter_count((64, 12, 9, 7, 10))
"""Bytes of the parameters of SMALL."""


@pytest.mark.parametrize(
    ("strategy", "times"),
    [(Mirrored(), 1), (Zero(1), 1), (Zero(2), 1), (Zero(3), 1.5), (CentralStorage(), 0.5)],
    ids=str,
)
def test_a_step_sends_these_parts_of_an_all_reduce(strategy, times):
    # Each of the parameters' 8 arrays may be padded by a number, or a layer by one.
    wanted = times * BYTES
    for sent, _ in costs(strategy, 2):
        assert abs(sent - wanted) <= 8 * 8


def test_one_device_sends_nothing_and_holds_all():
    ((sent, held),) = costs(OneDevice(), 1)
    assert sent == 0
    activations = 50 * 8 * (64 + 12 + 9 + 7 + 10)
    assert held == 3 * BYTES + activations


def test_a_stage_sends_its_output_or_the_gradient_of_its_input():
    sent = [sent for sent, _ in costs(Pipeline(splits=2, cut=(2, 2)), 2)]
    assert sent == [50 * 9 * 8] * 2


def test_columns_and_rows_send_an_output_and_the_gradient_of_an_input():
    # Layers 0 and 2 have columns, 1 and 3 rows: all-reduces of the outputs of 1 and 3, and of the
    # gradient of the input of 2.
    sent = [sent for sent, _ in costs(Tensor(), 2, algorithm="ring")]
    assert sum(sent) == 2 * 50 * (9 + 10 + 9) * 8


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Zero(3), Pipeline(), Tensor()], ids=str)
def test_a_divided_model_takes_less_memory_on_each_of_four_ranks(strategy):
    ((_, alone),) = costs(OneDevice(), 1, hidden=(64, 64, 64), batch=20)
    assert max(held for _, held in costs(strategy, 4, hidden=(64, 64, 64), batch=20)) < 0.75 * alone


# --- proofs while training ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "ranks"), [(Mirrored(), 3), (Hybrid(2, 2), 4), (Hybrid(3, 1, 1), 3)], ids=str
)
def test_a_replica_that_drifts_is_named_on_all_ranks(strategy, ranks):
    split = digits()

    def program(comm):
        trainer = Trainer(comm, split, SMALL, strategy=strategy)
        if comm.rank == 1:
            next(iter(trainer._part.parameters()))[...] += 1e-9
        with pytest.raises(DriftError) as error:
            trainer.run()
        return str(error.value)

    texts = set(rr.spawn(program, ranks))
    assert len(texts) == 1
    # Among two replicas, the one of the lower rank is taken to be right.
    assert "of rank 1 (" in texts.pop()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Zero(3), CentralStorage(), Pipeline(), Tensor()], ids=str)
def test_parameters_that_are_no_numbers_end_all_ranks(strategy):
    split = digits()

    def program(comm):
        trainer = Trainer(comm, split, replace(SMALL, check_every=1), strategy=strategy)
        update = trainer._part.update

        def spoilt(lr, step):
            update(lr, step)
            if comm.rank == 1:
                for array in trainer._part.parameters():
                    array.reshape(-1)[:1] = np.nan

        trainer._part.update = spoilt
        with pytest.raises(FloatingPointError, match="after step 1"):
            trainer.run()

    rr.spawn(program, 2)


# --- what is refused ------------------------------------------------------------------------------

UNSERVED = {"batch_norm": True, "clip": 1.0, "batch_shards": 8, "wire": "float16"}
REFUSED = [
    (OneDevice(), {}, "one_device is for one rank; there are 4: choose mirrored"),
    (Mirrored(), {}, "mirrored is for the ranks of one node; there are 2 nodes: choose "),
    (CentralStorage(), {}, "central_storage is for the ranks of one node; there are 2 nodes"),
    (MultiWorkerMirrored("ring"), {"algorithm": "tree"}, "communication is ring, and algorithm is"),
    (Zero(2), {"wire": "bfloat16"}, "wire cannot be combined with strategy zero"),
    (Zero(2), {"algorithm": "tree"}, "algorithm is tree; strategy zero takes ring, two_shot or"),
    (Pipeline(), {"hidden": (9, 9)}, "pipeline has 4 stages; the network has 3 layers"),
    (Pipeline(), {"batch_norm": True}, "batch_norm cannot be combined with the microbatches"),
    (Pipeline(), {"wire": "bfloat16"}, "wire is for gradients that replicas send; strategy pipe"),
    (Tensor(), {"wire": "bfloat16"}, "wire is for gradients that replicas send; strategy tensor"),
    (Hybrid(None, 3, 1), {}, "stages is 3 and tensor is 1; 4 ranks cannot be divided into groups"),
    (Pipeline(stages=2), {}, "stages is 2; 4 ranks with 1 each (virtual) have 4"),
    (Pipeline(cut=(2, 2)), {}, "cut is 2 2; pass 4 numbers of at least 1 that add up to the 4"),
    (Pipeline(splits=2000), {}, "splits is 2000; a batch has "),
    (
        Pipeline(split_size=20, schedule="interleaved"),
        {"batch_norm": True},
        "batch_norm cannot be combined with the microbatches",
    ),
    (Tensor(), {"algorithm": "thing"}, "unknown algorithm 'thing'"),
    (Mirrored("nccl"), {"algorithm": "tree"}, "there are 2 nodes"),
    (Hybrid(2, 1, 1), {}, "data=2, pipeline=1, tensor=1 have the product 2"),
    (Hybrid(2, 2, 1), {"batch_norm": True}, "batch_norm cannot be combined with the microbatches"),
    (ParameterServer(4), {}, "servers is 4; of 4 ranks that leaves no worker: pass fewer servers"),
    (ParameterServer(2, replicas=3), {}, "replicas is 3; wanted at most servers, 2"),
    (ParameterServer(backup_workers=3), {}, "backup_workers is 3; wanted fewer than workers, 3"),
    (ParameterServer(1, 1, 2, 1), {}, "backup_workers is 1 and staleness is 2; backup workers are"),
    *(
        (ParameterServer(), {name: value}, f"{name} cannot be combined with strategy parameter_")
        for name, value in UNSERVED.items()
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "changes", "text"), REFUSED, ids=str)
def test_a_strategy_that_does_not_fit_is_refused_on_all_ranks(strategy, changes, text):
    split, chosen = digits(), replace(SMALL, **changes)

    def program(comm):
        with pytest.raises(ValueError, match=re.escape(text)):
            rr.train.train(comm, split, chosen, strategy=strategy)
        comm.barrier()

    rr.spawn(program, 4, nodes=(2, 2))


def test_replicas_of_one_node_or_of_several_are_the_default():
    split = digits()

    def program(comm):
        return Trainer(comm, split, SMALL).strategy

    assert rr.spawn(program, 2) == [Mirrored()] * 2
    assert rr.spawn(program, 2, nodes=(1, 1)) == [MultiWorkerMirrored()] * 2


def test_a_strategy_and_the_settings_agree_on_the_algorithm():
    assert Mirrored("two_shot").algorithm(SMALL) == "two_shot"
    assert Mirrored().algorithm(replace(SMALL, algorithm="tree")) == "tree"
    with pytest.raises(ValueError, match="cross_device is two_shot, and algorithm is tree"):
        Mirrored("two_shot").algorithm(replace(SMALL, algorithm="tree"))
    with pytest.raises(ValueError, match="cross_device is nccl, and algorithm is tree"):
        Mirrored("nccl").algorithm(replace(SMALL, algorithm="tree"))


@pytest.mark.parametrize("strategy", ["zero", Zero])
def test_a_strategy_is_a_value(strategy):
    def program(comm):
        with pytest.raises(TypeError, match=r"pass a value such as rr.train.strategies.Zero"):
            rr.train.train(comm, digits(), SMALL, strategy=strategy)

    rr.spawn(program, 1)


def test_a_run_leaves_no_thread():
    def program(comm):
        rr.train.train(comm, digits(), SMALL, strategy=Hybrid(1, 1, 2))
        comm.barrier()
        before = threading.active_count()
        comm.barrier()
        rr.train.train(comm, digits(), SMALL, strategy=Hybrid(1, 1, 2))
        comm.barrier()
        return threading.active_count() - before

    assert max(rr.spawn(program, 2)) <= 0


# --- by name --------------------------------------------------------------------------------------


def test_names_are_the_classes_in_snake_case():
    assert list(STRATEGIES) == [
        *("one_device", "mirrored", "multi_worker_mirrored", "central_storage", "zero"),
        *("pipeline", "tensor", "hybrid", "tpu", "local_sgd", "parameter_server"),
    ]


@pytest.mark.parametrize(
    "strategy",
    [*(each for each, _ in OTHERS), Hybrid(2, 2, 1), LocalSGD(3), UNBOUND],
    ids=str,
)
def test_a_strategy_is_read_from_what_a_checkpoint_has_of_it(strategy):
    plain = to_plain(strategy)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
    assert by_name(values.pop("strategy"), values) == strategy


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--strategy pipline", "did you mean 'pipeline'?"),
        ("--strategy mirrored --stages 2", "stages is an option of strategy pipeline and hybrid"),
        ("--splits 2", "splits is an option of strategy pipeline and hybrid; strategy is auto"),
        ("--strategy pipeline --splits 2 --split-size 3", "splits is 2 and split_size is 3"),
        ("--strategy zero --zero 4", "zero is 4; wanted stage 1, 2 or 3"),
        ("--strategy hybrid --tensor -1", "tensor is -1; wanted a whole number of at least 1"),
        ("--strategy hybrid --virtual 2", "virtual is an option of strategy pipeline"),
        ("--strategy pipeline --schedule 1f1", "did you mean '1f1b'?"),
        ("--cross-device two_shot", "cross_device is an option of strategy mirrored; strategy is "),
        (
            "--strategy mirrored --cross-device two_shot --algorithm ring",
            "cross_device is two_shot, and algorithm is ring; name one of them",
        ),
        ("-n 2 --strategy one_device", "one_device is for one rank; there are 2: choose mirrored"),
        ("-n 4 --nodes 2,2 --strategy mirrored", "there are 2 nodes: choose multi_worker_mirrored"),
        ("-n 3 --strategy pipeline", "pipeline has 3 stages; the network has 2 layers"),
        ("-n 3 --strategy hybrid --stages 2", "3 ranks cannot be divided into groups of 2"),
        ("-n 2 --strategy zero --algorithm tree", "strategy zero takes ring, two_shot or auto"),
        ("-n 2 --strategy mirrored --cross-device nccl", "reduces on GPUs; add device cuda"),
        ("-n 2 --strategy pipeline --cut 1 2", "cut is 1 2; pass 2 numbers of at least 1 that"),
        ("-n 1 --strategy pipeline --virtual 2", "virtual is 2, but each rank has one stage"),
        (
            "-n 2 --strategy pipeline --schedule interleaved --splits 3",
            "splits is 3, no multiple of the 2 ranks; choose 2 or 4",
        ),
        ("-n 2 --strategy pipeline --splits 40", "splits is 40; a batch has 32 samples"),
        ("--strategy local_sgd --every 0", "every is 0; wanted a whole number of at least 1"),
        ("--strategy mirrored --every 2", "every is an option of strategy local_sgd; strategy is"),
        ("--strategy local_sgd --batch-norm", "batch_norm cannot be combined with strategy local"),
        ("--strategy local_sgd --clip 1", "clip cannot be combined with strategy local_sgd"),
        ("--strategy local_sgd --batch-shards 4", "batch_shards cannot be combined with strategy"),
        ("--strategy local_sgd --device cuda", "device cuda cannot be combined with strategy loc"),
        ("--strategy parameter_server --staleness 1.5", "staleness is '1.5'; wanted a whole"),
        ("--strategy parameter_server --staleness non", "number of at least 0, or none"),
        ("--strategy parameter_server --device cuda", "servers and workers have arrays on the cpu"),
    ],
)
def test_options_and_ranks_that_do_not_fit_are_refused_before_a_rank_starts(words, text, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "-n", "2", *words.split()])
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("program", "words"), [(read, []), (cli.main, ["train"])])
def test_help_prints_every_strategy_with_its_options(program, words, capsys):
    with pytest.raises(SystemExit) as stop:
        program([*words, "--strategy", "help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown == table() + "\n"
    names = [line for line in shown.splitlines() if not line.startswith(" ")]
    assert names == list(STRATEGIES)
    of_hybrid = shown.split("\nhybrid\n")[1].split("\ntpu\n")[0]
    assert "--data-parallel --stages --tensor --splits --schedule" in of_hybrid


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ("pipeline --splits 0 --split-size 0 --stages 0", Pipeline()),
        ("hybrid --stages 0 --splits 0 --data-parallel 0", Hybrid()),
        ("zero --zero 2", Zero(2)),
        ("parameter_server --staleness none --servers 2", UNBOUND),
        ("hybrid --stages 3 --data-parallel 2", Hybrid(2, 3)),
    ],
)
def test_zero_stands_for_a_number_that_follows_from_others(words, strategy):
    assert read(["--strategy", *words.split()]).strategy() == strategy


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (Zero, {"stage": True}, "zero is True; wanted stage 1, 2 or 3"),
        (Hybrid, {"pipeline": 2.0}, "stages is 2.0; wanted a whole number of at least 1"),
        (Hybrid, {"tensor": None}, "tensor is None; wanted a whole number of at least 1"),
        (Pipeline, {"schedule": 1}, "schedule is 1; wanted the name of a schedule"),
        (
            ParameterServer,
            {"staleness": 1.5},
            "staleness is 1.5; wanted a whole number of at least 0, or none",
        ),
        (Pipeline, {"cut": (2, 0)}, "cut is (2, 0); wanted balanced, or layers of each stage"),
    ],
)
def test_a_value_that_a_field_does_not_take_is_refused(kind, values, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        kind(**values)


def test_an_option_overrides_that_of_the_checkpoint_and_another_strategy_all_of_them():
    before = {"strategy": "pipeline", "splits": 4, "schedule": "gpipe"}
    assert read(["--splits", "6", "--resume", "--checkpoint-dir", "c"]).strategy(before) == (
        Pipeline(splits=6, schedule="gpipe")
    )
    assert read(["--strategy", "zero"]).strategy(before) == Zero()
    assert read([]).strategy({}) is None
