"""Train one network by each strategy that needs no JAX, and compare it with one process.

A strategy decides which rank has which parameters. All of them compute the same, up to rounding.

    ringreduce run -n 4 examples/strategies.py

prints the most bytes that a rank sends in a step, and the most bytes that a rank holds:

    strategy               difference  accuracy  sent a step  held by a rank
    mirrored                  < 1e-12    87.2 %      157,568         454,208
    multi_worker_mirrored     < 1e-12    87.2 %      157,560         454,208
    central_storage           < 1e-12    87.2 %       78,792         283,416
    zero, stage 1             < 1e-12    87.2 %      157,584         322,936
    zero, stage 2             < 1e-12    87.2 %      157,584         283,416
    zero, stage 3             < 1e-12    87.2 %      236,376         272,224
    pipeline, gpipe           < 1e-12    87.2 %       65,536         231,936
    pipeline, 1f1b            < 1e-12    87.2 %       65,536         199,168
    tensor                    < 1e-12    87.2 %      105,984         193,856
    hybrid, 2 replicas        < 1e-12    87.2 %       82,944         381,952
    hybrid, 1 replica         < 1e-12    87.2 %       70,656         249,600
"""

import numpy as np

import ringreduce as rr

strategies = rr.train.strategies
CHOSEN = {
    "mirrored": strategies.Mirrored(cross_device="two_shot"),
    "multi_worker_mirrored": strategies.MultiWorkerMirrored(communication="ring"),
    "central_storage": strategies.CentralStorage(),
    "zero, stage 1": strategies.Zero(stage=1),
    "zero, stage 2": strategies.Zero(stage=2),
    "zero, stage 3": strategies.Zero(stage=3),
    "pipeline, gpipe": strategies.Pipeline(splits=8, schedule="gpipe"),
    "pipeline, 1f1b": strategies.Pipeline(splits=8, schedule="1f1b"),
    "tensor": strategies.Tensor(),
    "hybrid, 2 replicas": strategies.Hybrid(data=2, pipeline=2),
    "hybrid, 1 replica": strategies.Hybrid(data=1, pipeline=2, tensor=2),
}
BUCKETS = {"first_bucket_bytes": 1 << 15, "bucket_bytes": 1 << 15}  # about one layer
SETTINGS = rr.train.Settings(
    hidden=(64, 64, 64), epochs=2, batch=64, optimizer="adam", lr=0.003, dtype="float64", **BUCKETS
)

with rr.init() as comm:
    split = rr.train.load(SETTINGS)
    alone = comm.split(comm.rank)  # each rank trains alone, to compare
    one = rr.train.train(alone, split, SETTINGS, strategy=strategies.OneDevice())
    if comm.rank == 0:
        print("strategy               difference  accuracy  sent a step  held by a rank")
    for name, strategy in CHOSEN.items():
        result = rr.train.train(comm, split, SETTINGS, strategy=strategy)
        difference = np.abs(result.parameters - one.parameters).max()
        assert difference < 1e-12
        sent, held = comm.all_reduce(np.array([result.sent_bytes, result.held_bytes]), "max")
        accuracy = f"{100 * result.accuracy:.1f} %"
        if comm.rank == 0:
            print(f"{name:21}     < 1e-12  {accuracy:>8}  {sent:11,}  {held:14,}")
