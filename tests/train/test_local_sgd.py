"""LocalSGD: replicas that step alone, and average their weights every few steps."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.parallel import sampler
from ringreduce.train import Settings, Trainer, mlp, optimizers
from ringreduce.train.steps import Course, Stretch
from ringreduce.train.strategies import LocalSGD, Mirrored

SAMPLES, EPOCH_STEPS = 151, 4
SMALL = Settings(
    epochs=2, hidden=(9, 7), batch=50, dtype="float64", lr=0.05, weight_decay=0.01, noise=0.0
)
"""An epoch has four steps, the last on one sample."""
DEADLINE_S = 120.0
"""Only ranks that hang wait so long."""


def digits() -> rr.train.Split:
    split = rr.train.load(SMALL)
    return replace(
        split, train_x=split.train_x[:SAMPLES], train_labels=split.train_labels[:SAMPLES]
    )


class Seen:
    """A watcher that keeps all losses."""

    def __init__(self):
        self.of_steps, self.of_epochs = [], []

    def steps(self, steps):
        self.of_steps += [step.loss for step in steps]

    def epoch(self, epoch):
        self.of_epochs.append(epoch.loss)


def train(ranks, strategy, settings=SMALL):
    """Return each rank's result and the losses that it saw."""
    split = digits()

    def program(comm):
        seen = Seen()
        return rr.train.train(comm, split, settings, strategy=strategy, watchers=[seen]), seen

    return rr.spawn(program, ranks)


def simulated(ranks, every):
    """Return the parameters of SMALL and the losses of its steps, without communication."""
    split = digits()
    course = Course(SAMPLES, SMALL, Stretch.new(SMALL.batch))
    sizes = split.widths(SMALL.hidden)
    flats = [mlp.init_params(sizes, SMALL.seed, np.float64) for _ in range(ranks)]
    velocities, losses = [np.zeros_like(flat) for flat in flats], []
    for step in range(course.steps):
        batch, loss = course.batch_of(step), 0.0
        for rank, (flat, velocity) in enumerate(zip(flats, velocities, strict=True)):
            rows = batch[sampler.part(len(batch), rank, ranks)]
            network = mlp.layers(mlp.views(flat, sizes))
            x, labels = split.train_x[rows], split.train_labels[rows]
            share, _, gradients = mlp.step(network, x, labels, len(batch), {})
            of_name, loss = dict(gradients), loss + share
            gradient = ranks * np.concatenate([of_name[n].ravel() for n in _names(flat, sizes)])
            lr = course.learning_rate(step)
            optimizers.sgd((flat, velocity), gradient, lr, SMALL.momentum, SMALL.weight_decay)
        losses.append(loss)
        if (step % EPOCH_STEPS + 1) % every == 0 or course.ends_epoch(step):
            mean = np.mean(flats, axis=0)
            flats = [mean.copy() for _ in flats]
    return flats[0], losses


def _names(flat, sizes):
    return mlp.named(mlp.views(flat, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_average_in_every_step_is_what_gradients_added_up_are(ranks):
    alone, local = train(ranks, Mirrored()), train(ranks, LocalSGD(every=1))
    assert len({result.digest for result, _ in local}) == 1
    (wanted, wanted_losses), (found, losses) = alone[0], local[0]
    np.testing.assert_allclose(found.parameters, wanted.parameters, rtol=0, atol=1e-13)
    np.testing.assert_allclose(losses.of_steps, wanted_losses.of_steps, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "every"), [(2, 2), (3, 3), (2, 100)])
def test_replicas_step_alone_and_average_every_few_steps_and_after_an_epoch(ranks, every):
    results = train(ranks, LocalSGD(every=every))
    parameters, losses = simulated(ranks, every)
    of_epochs = [np.average(losses[n:][:EPOCH_STEPS], weights=[50, 50, 50, 1]) for n in (0, 4)]
    for result, seen in results:
        np.testing.assert_allclose(result.parameters, parameters, rtol=0, atol=1e-13)
        np.testing.assert_allclose(seen.of_steps, losses, rtol=1e-12)
        np.testing.assert_allclose(seen.of_epochs, of_epochs, rtol=1e-12)


def test_nothing_is_collective_between_averages():
    split, arrived = digits(), threading.Event()
    chosen = replace(SMALL, epochs=1, check_every=1)

    def program(comm):
        trainer = Trainer(comm, split, chosen, strategy=LocalSGD(every=3))
        compute, meet = trainer._part.gradients, trainer._part.meet

        def late(*args):  # rank 1 begins when rank 0 is at the average
            assert comm.rank == 0 or arrived.wait(DEADLINE_S)
            return compute(*args)

        def noted():
            if comm.rank == 0:
                arrived.set()
            meet()

        trainer._part.gradients, trainer._part.meet = late, noted
        return trainer.run(save=lambda _: None, save_every=1).digest

    assert len(set(rr.spawn(program, 2))) == 1


@pytest.mark.slow
def test_checkpoints_that_are_due_wait_for_the_next_average():
    split = digits()

    def program(comm):
        saved = []
        trainer = Trainer(comm, split, SMALL, strategy=LocalSGD(every=3))
        trainer.run(save=lambda trainer: saved.append(trainer.state.step), save_every=2)
        return saved

    assert rr.spawn(program, 2) == [[3, 4, 7, 8]] * 2


@pytest.mark.slow
def test_a_checkpoint_goes_on_as_replicas_that_add_up_gradients():
    split, chosen = digits(), replace(SMALL, lr_schedule="constant")

    def program(comm):
        before = Trainer(comm, split, replace(chosen, epochs=1), strategy=LocalSGD(every=1))
        before.run()
        after = Trainer(comm, split, chosen, strategy=Mirrored())
        after.restore(before.arrays(), before.state)
        return after.run().parameters

    found = rr.spawn(program, 2)[0]
    ((wanted, _), _) = train(2, Mirrored(), chosen)
    np.testing.assert_allclose(found, wanted.parameters, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_an_average_may_be_further_away_than_the_journal_is_long():
    one, two = train(2, LocalSGD(every=1000), replace(SMALL, batch=1, lr=0.01))
    losses = one[1].of_steps
    assert losses == two[1].of_steps
    assert len(losses) == 2 * SAMPLES
    means = [np.mean(losses[:SAMPLES]), np.mean(losses[SAMPLES:])]
    np.testing.assert_allclose(one[1].of_epochs, means, rtol=1e-12)


@pytest.mark.slow
def test_a_wire_loses_no_small_steps():
    """The changes are far below what bfloat16 keeps of a weight."""
    chosen = replace(SMALL, lr=1e-5, momentum=0.0)
    found, wanted = (
        train(2, LocalSGD(every=2), replace(chosen, wire=wire))[0][0].parameters
        for wire in ("bfloat16", "none")
    )
    start = mlp.init_params(digits().widths(SMALL.hidden), SMALL.seed, np.float64)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted - start)


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["none", "bfloat16"])
def test_a_step_sends_its_share_of_an_all_reduce(wire):
    chosen = replace(SMALL, epochs=1, wire=wire)
    every_step, local = (train(2, each, chosen)[0][0] for each in (Mirrored(), LocalSGD(every=4)))
    assert local.sent_bytes == every_step.sent_bytes // 4


def test_an_infinite_loss_of_one_rank_ends_all_with_one_text():
    split = digits()

    def program(comm):
        trainer = Trainer(comm, split, SMALL, strategy=LocalSGD(every=3))
        if comm.rank == 1:
            next(iter(trainer._part.parameters()))[...] = np.inf
        with pytest.raises(FloatingPointError) as error:
            trainer.run()
        return str(error.value)

    (text,) = set(rr.spawn(program, 2))
    assert "the loss is nan in step 1, epoch 1" in text
