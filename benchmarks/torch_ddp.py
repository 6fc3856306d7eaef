"""A training step of DistributedDataParallel and FSDP2 over ringreduce, beside Gloo, in turns.

    .venv-torch/bin/python -m benchmarks.torch_ddp

In an environment with torch's CPU wheel and an MPI.  Starts `ringreduce run` with each number of
ranks, one thread each.  The contenders of a row:

- ``alone``: the model without DistributedDataParallel,
- ``nothing``: over a backend whose all-reduce does nothing: the step with torch's own copies,
- ``gloo``: over Gloo,
- ``ours``: over ringreduce with ``RINGREDUCE_TORCH_SHARE=0``: buckets are ordinary tensors,
- ``registered``: over ringreduce, which moves the buckets to registered memory.

The row ``transformer_fsdp2`` shards the parameters (`fully_shard`), and has no contender
``registered``: its buffers are ordinary tensors.

*Communication* is the time of a step less that over the backend that does nothing.  The gradients
of ours are compared with Gloo's.  Writes ``bench_results/torch_ddp.jsonl``: medians of the
times of all steps on rank 0, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import environment, replace

NAME = "torch_ddp"
RANKS = (2, 4)
FSDP2 = "transformer_fsdp2"
MODELS = ("mlp_5k", "mlp_21m", "conv", "transformer", "resnet50_gradients", FSDP2)
_TURNS, _STEPS = 6, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return 0
    for ranks in options.ranks:
        ringreduce = Path(sys.executable).parent / "ringreduce"
        program = ["-m", "benchmarks.torch_ddp", "--worker", "--models", *options.models]
        command = [ringreduce, "run", "-n", str(ranks), *program]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        replace(NAME, rows, same=("cpu", "ranks", "model", "views"))
    return 0


def _work(options: argparse.Namespace) -> None:
    """As a rank: time all contenders of each row.  Rank 0 prints the rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.Backend.register_backend("nothing", _does_nothing, extended_api=True, devices=["cpu"])
    dist.init_process_group("ringreduce")
    groups = {
        "nothing": dist.new_group(backend="nothing"),
        "gloo": dist.new_group(backend="gloo"),
        "registered": dist.new_group(),
    }
    os.environ["RINGREDUCE_TORCH_SHARE"] = "0"
    groups["ours"] = dist.new_group()
    import ringreduce as rr

    where = environment("python -m benchmarks.torch_ddp") | {"torch": torch.__version__}
    rr.init()  # the rows name the MPI that has started the job
    for model in options.models:
        for views in (False, True) if model != FSDP2 else (False,):
            times = _times(model, views, groups)
            if dist.get_rank() == 0:
                row = {"benchmark": NAME, "model": model, "views": views, **times}
                print(json.dumps(row | where), flush=True)
                _show(row, dist.get_world_size())
    dist.destroy_process_group()


def _does_nothing(options: Any, _: Any) -> Any:
    from ringreduce.torch.group import RingReduceGroup
    from ringreduce.torch.works import FinishedWork

    class Nothing(RingReduceGroup):
        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return FinishedWork(tensors)

        def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
            return FinishedWork([output])

        def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> Any:
            return FinishedWork([output])

        _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    return Nothing(options, "nothing", moves=False)


def _show(row: dict[str, Any], ranks: int) -> None:
    shown = " ".join(f"{name[:-3]} {row[name]:.2f}" for name in row if name.endswith("_ms"))
    registered = row.get("registered_of_gloo")
    print(
        f"{row['model']} views={row['views']}, {ranks} ranks, ms: {shown}; communication "
        f"{row['of_gloo']:.2f} of Gloo's"
        + (f", registered {registered:.2f}" if registered is not None else ""),
        file=sys.stderr,
    )


def _times(name: str, views: bool, groups: dict[str, Any]) -> dict[str, float]:
    """Return the median times of a step, in milliseconds, and how communication compares."""
    import torch
    import torch.distributed as dist

    inputs = _inputs(name)
    models: dict[str, Any] = {"alone": _model(name)}
    for contender, group in groups.items():
        if name != FSDP2 or contender != "registered":
            models[contender] = _parallel(name, views, group)
    steps = {contender: _step(model, inputs) for contender, model in models.items()}
    for step in steps.values():
        for _ in range(3):  # the second rebuilds the buckets
            step()
    for contender in {"ours", "registered"} & models.keys():
        both = models[contender].parameters(), models["gloo"].parameters()
        for mine, theirs in zip(*both, strict=True):
            torch.testing.assert_close(_gradient(mine), _gradient(theirs))
    found: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(_TURNS):
        for contender, step in steps.items():
            dist.barrier()
            step()
            for _ in range(_STEPS):
                began = time.perf_counter()
                step()
                found[contender].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) * 1e3 for name, times in found.items()}
    communication = {each: ms - medians["nothing"] for each, ms in medians.items()}
    of_gloo = {each: ms / communication["gloo"] for each, ms in communication.items()}
    found_of_gloo = {"of_gloo": of_gloo["ours"]}
    if "registered" in of_gloo:
        found_of_gloo["registered_of_gloo"] = of_gloo["registered"]
    in_ms = {f"{name}_ms": ms for name, ms in medians.items()}
    return in_ms | found_of_gloo | {"steps": _TURNS * _STEPS}


def _parallel(name: str, views: bool, group: Any) -> Any:
    """Return the model of this name whose steps communicate over a group."""
    from torch.distributed import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = _model(name)
    if name != FSDP2:
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _gradient(parameter: Any) -> Any:
    """Return the gradient of a parameter, or of this rank's part of it."""
    gradient = parameter.grad
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _step(model: Any, inputs: Any) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()

    return step


def _inputs(name: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    shape = {
        "mlp_5k": (32, 64),
        "mlp_21m": (64, 2048),
        "conv": (16, 3, 32, 32),
        "transformer": (4, 64, 256),
        FSDP2: (4, 64, 256),
        "resnet50_gradients": (1,),
    }[name]
    return torch.randn(shape)


def _model(name: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    match name:
        case "mlp_5k":
            return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        case "mlp_21m":
            wide = [each for _ in range(5) for each in (nn.Linear(2048, 2048), nn.ReLU())]
            return nn.Sequential(*wide, nn.Linear(2048, 10))
        case "conv":
            layers: list[nn.Module] = []
            for before, after in ((3, 64), (64, 128), (128, 256), (256, 320)):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(320 * 4, 10))
        case "transformer" | "transformer_fsdp2":
            layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        case _:
            return _ParametersAlone(_shapes_of_resnet50())


def _ParametersAlone(shapes: list[tuple[int, ...]]) -> Any:  # noqa: N802 - makes a module
    """Return a module of parameters of these shapes, whose step does little but its gradients."""
    import torch
    from torch import nn

    class Parameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(torch.randn(shape) * 1e-3 for shape in shapes)

        def forward(self, x: Any) -> Any:
            return torch.stack([(parameter * x).sum() for parameter in self.all])

    return Parameters()


def _shapes_of_resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of the 25.6 million parameters, from the first layer to the last."""

    def convolution(inputs: int, outputs: int, side: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, side, side), (outputs,), (outputs,)]

    shapes = convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(inputs, width, 1) + convolution(width, width, 3)
            shapes += convolution(width, 4 * width, 1)
            if block == 0:
                shapes += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


if __name__ == "__main__":
    sys.exit(main())
