"""Write a schedule of a pipeline, prove it, draw it and train layers of your own with it.

    ringreduce run -n 2 examples/own_pipeline.py

prints what follows, and draws the schedule above 1f1b in pairs.svg:

    pairs of 2 ranks and 4 microbatches: time 18, 33 % idle
    rank 0  F0 F1          B0─── B1─── F2 F3          B2─── B3───   33 % idle
    rank 1     F0 F1 B0─── B1───          F2 F3 B2─── B3───         33 % idle
    F: forward; B: backward; behind it the microbatch
    idle by 1f1b: 20 %
"""

from pathlib import Path

import numpy as np

import ringreduce as rr


def pairs(ranks, rank, splits, virtual):
    """Compute two microbatches forward, then these two backward, and so on."""
    for first in range(0, splits, 2):
        yield from (f"{rank}{kind}{first + more}" for kind in "FB" for more in (0, 1))


class Layer:
    def __init__(self, number, inputs, outputs):
        weight = np.random.default_rng(number).standard_normal((inputs, outputs))
        self.name = f"{number}.weight"
        self.parameters = {self.name: weight * inputs**-0.5}

    def forward(self, x):
        y = np.tanh(x @ self.parameters[self.name])
        return y, (x, y)

    def backward(self, kept, gradient, into):
        x, y = kept
        gradient = gradient * (1 - y * y)
        return gradient @ self.parameters[self.name].T, [(self.name, x.T @ gradient)]


rr.pipeline.register("pairs", pairs)
with rr.init() as comm:
    split, losses = rr.train.load_split(np.float64), []
    layers = [Layer(0, 64, 48), Layer(1, 48, 48), Layer(2, 48, 10)]
    pipe = rr.train.PipelineParallel(comm, layers, splits=4, schedule="pairs")  # proves it
    for rows in np.array_split(np.random.default_rng(0).permutation(1438), 40):
        losses.append(pipe.step(split.train_x[rows], split.train_labels[rows], count=len(rows)))
        for name, gradient in pipe.gradients.items():
            pipe.parameters[name] -= 0.5 * gradient
    assert pipe.held == pipe.proof.held[comm.rank]
    assert losses[-1] < losses[0] / 2
    if comm.rank == 0:
        known = rr.pipeline.schedule("1f1b", comm.size, splits=4)
        Path("pairs.svg").write_text(rr.pipeline.to_svg(pipe.schedule, known))
        print(rr.pipeline.draw(pipe.schedule))
        print(f"idle by 1f1b: {100 * rr.pipeline.prove(known).idle:.0f} %")
