"""The stages of one rank: cut from a model, and computed action by action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import ringreduce as rr
from ringreduce.errors import counted, shown
from ringreduce.parallel.arrays import check_used
from ringreduce.parallel.layers import Array, Gradients, Layer, backward_all, forward_all

Loss = Callable[[Array, Array, int], tuple[Any, Array]]
"""(output of the last layer, labels, count) -> the loss, and its gradient by the output."""
MakesLayer = Callable[[], Layer]
Stages = Mapping[int, Sequence[Layer]]
_WHERE = "PipelineParallel"


# --- the cut --------------------------------------------------------------------------------------


def right_cut(stages: int, layers: int) -> str:
    """Say in an error how to pass `cut`."""
    return (
        f"pass {counted(stages, 'number')} of at least 1 that add{'s' * (stages == 1)} up to the "
        f"{counted(layers, 'layer')}"
    )


def splits_of_size(rows: int, split_size: int, schedule: str, ranks: int) -> int:
    """Return the number of microbatches of a batch of `rows` samples.

    Each has `split_size` samples at most.  Schedule "interleaved" takes a multiple of the ranks.
    """
    fewest = max(1, -(-rows // split_size))
    return -(-fewest // ranks) * ranks if schedule == "interleaved" else fewest


def cut_of(
    layers: Sequence[Layer | MakesLayer],
    stages: int,
    cut: str | Sequence[int],
    costs: Sequence[float] | None,
) -> tuple[int, ...]:
    """Return the number of layers of each stage.  Raises ValueError if there is no such cut."""
    for number, each in enumerate(layers):
        if not (hasattr(each, "forward") or callable(each)):
            raise TypeError(
                f"{_WHERE}: layers[{number}] is {shown(each)}; pass an object with forward, "
                "backward and parameters, or a function that returns one"
            )
    if len(layers) < stages:
        raise ValueError(
            f"{_WHERE}: layers has length {len(layers)}; each of the "
            f"{counted(stages, 'stage')} needs a layer"
        )
    if costs is not None and (cut != "balanced" or len(costs) != len(layers)):
        raise ValueError(
            f"{_WHERE}: costs has {counted(len(costs), 'number')} and cut is {shown(cut)}; pass "
            f"the cost of each of the {counted(len(layers), 'layer')}, with cut='balanced'"
        )
    if isinstance(cut, str):
        if cut != "balanced":
            raise ValueError(f"{_WHERE}: cut is {shown(cut)}; pass 'balanced' or a list of numbers")
        return rr.pipeline.balance(costs or [*map(_parameter_count, layers)], stages)
    found = tuple(cut)
    right = len(found) == stages and sum(found) == len(layers)
    if not right or not all(isinstance(each, int) and each >= 1 for each in found):
        raise ValueError(f"{_WHERE}: cut is {list(found)}; {right_cut(stages, len(layers))}")
    return found


def stages_of(
    layers: Sequence[Layer | MakesLayer], cut: Sequence[int], mine: Iterable[int]
) -> dict[int, tuple[Layer, ...]]:
    """Return the layers of the stages `mine`; a function in the place of a layer is called."""
    return {
        stage: tuple(_made(each) for each in layers[sum(cut[:stage]) : sum(cut[: stage + 1])])
        for stage in mine
    }


def _made(layer: Any) -> Layer:
    made: Layer = layer() if _makes_layer(layer) else layer
    return made


def _makes_layer(layer: Any) -> bool:
    return isinstance(layer, type) or not hasattr(layer, "forward")


def _parameter_count(layer: Any) -> float:
    if _makes_layer(layer):
        raise ValueError(
            f"{_WHERE}: a layer is a function, whose cost is not known; pass costs, or a cut"
        )
    return float(sum(array.size for array in layer.parameters.values()))


# --- gradients ------------------------------------------------------------------------------------


class GradientSums:
    """The gradients of a rank's parameters, added up over microbatches in ascending order."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        into: Mapping[str, Array],
        on_gradient: Callable[[str, Array], Any] | None,
        xp: ModuleType,
    ) -> None:
        for name, array in parameters.items():
            place = into.get(name, array)
            if (place.shape, place.dtype) != (array.shape, array.dtype):
                raise ValueError(
                    f"{_WHERE}: into has {place.dtype}{list(place.shape)} for {name!r}; wanted "
                    f"{array.dtype}{list(array.shape)}"
                )
        self.sums = {
            name: into[name] if name in into else xp.zeros_like(array)
            for name, array in parameters.items()
        }
        self._on_gradient, self._xp = on_gradient, xp
        self._scratch: dict[str, Array] = {}
        """Name -> array for the gradient of a microbatch after the first."""

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, and of the arrays for the gradients of one microbatch."""
        arrays = [*self.sums.values(), *self._scratch.values()]
        return sum(int(array.nbytes) for array in arrays)

    def places(self, microbatch: int) -> Mapping[str, Array]:
        """Return name -> array in which the gradient of a microbatch may be computed."""
        if microbatch == 0:
            return self.sums
        if not self._scratch:
            self._scratch = {name: self._xp.empty_like(a) for name, a in self.sums.items()}
        return self._scratch

    def add(self, microbatch: int, gradients: Gradients, *, last: bool) -> None:
        """Add the gradients of a layer; report the sums if the microbatch is the last."""
        for name, gradient in gradients:
            place = self.sums[name]
            check_used(_WHERE, name, gradient, place)
            if microbatch:
                place += gradient
            elif gradient is not place:
                place[...] = gradient
            if last and self._on_gradient is not None:
                self._on_gradient(name, place)


# --- one step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitBatch:
    x: Array
    """Samples; None on a rank without the first stage."""
    labels: Array
    """Labels; None on a rank without the last stage."""
    count: int
    parts: Sequence[slice]
    """Microbatch -> its rows."""


class _Held(NamedTuple):
    """What a rank holds of a stage and a microbatch, from forward to the weights' gradients."""

    kept: list[Any]
    """What each layer's `forward` has returned for its `backward`."""
    nbytes: int


class StepOfStages:
    """The actions of a rank in one step of training."""

    def __init__(
        self, stages: Stages, last: int, batch: SplitBatch, loss: Loss, gradients: GradientSums
    ) -> None:
        """Begin a step with `batch`; `last` is the number of the model's last stage."""
        self._stages, self._last, self._batch = stages, last, batch
        self._loss_function, self._gradients = loss, gradients
        self._losses: dict[int, Any] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._of_logits: dict[int, Array] = {}
        """Microbatch -> gradient of the loss by the output of the last stage."""
        self._delayed: dict[tuple[int, int], tuple[dict[str, Array], list[Gradients]]] = {}
        """Stage and microbatch -> arrays for the gradients of weights, and these gradients."""
        self.held = self.held_bytes = 0
        """The most activations, and their bytes, held at once so far."""

    @property
    def loss(self) -> float:
        """The loss of all microbatches, added up in ascending order."""
        return float(sum(float(self._losses[number]) for number in sorted(self._losses)))

    def execute(self, action: rr.pipeline.Action, given: Array | None) -> Array | None:
        if action.kind == "F":
            return self._forward(action.stage, action.microbatch, given)
        if action.kind == "W":
            self._weights(action.stage, action.microbatch)
            return None
        if action.stage == self._last:
            given = self._of_logits.pop(action.microbatch)
        if action.kind == "B":
            return self._backward(action.stage, action.microbatch, given)
        return self._input(action.stage, action.microbatch, given)

    # --- implementation ---

    def _forward(self, stage: int, microbatch: int, given: Array | None) -> Array | None:
        rows = self._batch.parts[microbatch]
        x = self._batch.x[rows] if stage == 0 else given
        y, kept = forward_all(self._stages[stage], x)
        samples = rows.stop - rows.start
        if len(y) != samples:
            raise ValueError(
                f"{_WHERE}: stage {stage} returns {counted(len(y), 'sample')} for {samples}; the "
                "first axis of each layer's output are the samples"
            )
        self._held[stage, microbatch] = _Held(kept, activation_bytes(kept))
        self.held = max(self.held, len(self._held))
        self.held_bytes = max(self.held_bytes, sum(each.nbytes for each in self._held.values()))
        if stage < self._last:
            return y
        labels = self._batch.labels[rows]
        self._losses[microbatch], gradient = self._loss_function(y, labels, self._batch.count)
        self._of_logits[microbatch] = gradient
        return None

    def _backward(self, stage: int, microbatch: int, gradient: Array) -> Array | None:
        """Compute the gradients of each layer's input and weights in turn."""
        kept = self._held.pop((stage, microbatch)).kept
        places = self._gradients.places(microbatch)
        add = partial(self._gradients.add, microbatch, last=self._is_last(microbatch))
        return self._through(stage, kept, gradient, places, add)

    def _input(self, stage: int, microbatch: int, gradient: Array) -> Array | None:
        """Compute the gradient of the input, and keep the iterables of the weights' gradients.

        The layers get a dict without arrays.  `_weights` puts the arrays there.  A layer that
        computes its gradients now would otherwise write to arrays that are in use until then.
        """
        kept = self._held[stage, microbatch].kept
        places: dict[str, Array] = {}
        delayed: list[Gradients] = []
        self._delayed[stage, microbatch] = places, delayed
        return self._through(stage, kept, gradient, places, delayed.append)

    def _weights(self, stage: int, microbatch: int) -> None:
        places, delayed = self._delayed.pop((stage, microbatch))
        places.update(self._gradients.places(microbatch))
        for of_layer in delayed:
            self._gradients.add(microbatch, of_layer, last=self._is_last(microbatch))
        del self._held[stage, microbatch]

    def _through(
        self,
        stage: int,
        kept: list[Any],
        gradient: Array,
        places: Mapping[str, Array],
        take: Callable[[Gradients], None],
    ) -> Array | None:
        """Call `backward` of the layers; return the gradient of the stage's input if it is needed.

        Each layer's gradients of weights are passed to `take`.
        """
        layers, of_input = self._stages[stage], gradient
        results = backward_all(layers, kept, gradient, places)
        for layer, result in zip(reversed(layers), results, strict=True):
            of_input, of_weights = result
            take(_each_once(layer.parameters, of_weights))
        if stage == 0:
            return None
        if of_input is None:
            raise ValueError(
                f"{_WHERE}: the first layer of stage {stage} returns no gradient of its input; "
                "the stage before needs it"
            )
        return of_input

    def _is_last(self, microbatch: int) -> bool:
        return microbatch == len(self._batch.parts) - 1


def _each_once(parameters: Mapping[str, Array], gradients: Gradients) -> Gradients:
    """Yield the gradients of a layer.

    Raises ValueError unless each parameter has one gradient.  Without one, the sum would keep its
    value of the last step.  Of two, the second would overwrite the first.
    """
    left = set(parameters)
    for name, gradient in gradients:
        if name not in left:
            fault = "twice" if name in parameters else "which is no parameter of the layer"
            raise ValueError(f"{_WHERE}: backward returned a gradient of {name!r}, {fault}")
        left.remove(name)
        yield name, gradient
    if left:
        raise ValueError(
            f"{_WHERE}: backward returned no gradient of {min(left)!r}; return one for each "
            "parameter of the layer"
        )


def activation_bytes(kept: Any) -> int:
    """Return the bytes of all arrays in what `forward` has returned; each array counts once."""
    return sum({id(array): array.nbytes for array in _arrays(kept)}.values())


def _arrays(kept: Any) -> Iterator[Array]:
    if hasattr(kept, "nbytes") and hasattr(kept, "dtype"):
        yield kept
    elif isinstance(kept, Mapping):
        yield from (array for each in kept.values() for array in _arrays(each))
    elif isinstance(kept, (list, tuple)):
        yield from (array for each in kept for array in _arrays(each))
    elif is_dataclass(kept):
        yield from (a for field in fields(kept) for a in _arrays(getattr(kept, field.name)))
