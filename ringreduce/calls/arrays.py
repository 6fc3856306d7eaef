"""Where arrays live: in host memory, or on a card, which is found out without importing CuPy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ringreduce.calls.arguments import as_array as as_host_array
from ringreduce.calls.arguments import as_out as as_host_out
from ringreduce.calls.arguments import check_overlap, overlap_error, same_memory
from ringreduce.devices.base import Device

_CARD_MEMORY = (2, 13)
"""What DLPack calls memory of a CUDA card, and managed memory."""


def card_of(x: Any) -> int | None:
    """The number of the card whose memory holds `x`; None for anything else."""
    if not hasattr(x, "__dlpack_device__"):
        return None
    kind, number = x.__dlpack_device__()
    return int(number) if kind in _CARD_MEMORY else None


def card_of_name(where: str, device: str) -> int:
    """The number of the card that is called ``"cuda"`` or ``"cuda:1"``."""
    name, _, number = device.partition(":")
    if name != "cuda" or not (number or "0").isdecimal():
        raise ValueError(f"{where}: unknown device {device!r}; choose 'cpu', 'cuda' or 'cuda:1'")
    return int(number or 0)


def open_card(number: int) -> Device:
    """A device for arrays on this card, with a stream of its own."""
    device: Device = _cuda("a call").CudaDevice(number)
    return device


def as_array(where: str, x: Any) -> Any:
    """`x` where it lives, without a copy: a NumPy array, or CuPy's for what lives on a card.

    Raises TypeError for what is no array and no number, ImportError where CuPy is missing.
    """
    return as_host_array(where, x) if card_of(x) is None else _cuda(where).as_card_array(x)


def as_out(where: str, out: Any, x: Any) -> Any:
    """`out` as an array where `x` lives.

    Raises TypeError for what shows no memory, or lives elsewhere.
    """
    place, card = card_of(x), card_of(out)
    view = as_host_out(where, out) if card is None else _cuda(where).as_card_array(out)
    if place != card:
        raise TypeError(f"{where}: out is {_place(card)}, the array is {_place(place)}")
    return view


def check_together(where: str, arrays: list[Any]) -> None:
    """Raises TypeError unless all members of a list live in the same place."""
    places: dict[int | None, int] = {}
    for index, array in enumerate(arrays):
        places.setdefault(card_of(array), index)
    if len(places) > 1:
        said = ", ".join(f"member {i} is {_place(card)}" for card, i in places.items())
        raise TypeError(f"{where}: {said}; pass lists of arrays that live in the same place")


def is_input(where: str, device: Device, x: Any, out: Any, allowed: bool) -> bool:
    """Whether `out` is the input itself, if that is allowed.

    Raises ValueError when they share some memory otherwise.
    """
    if device.stream is None:
        if allowed and same_memory(x, out):
            return True
        check_overlap(where, x, out)
    elif device.overlap(x, out):
        layouts = [(a.shape, a.strides, device.address(a)) for a in (x, out)]
        if allowed and layouts[0] == layouts[1]:
            return True
        raise overlap_error(where)
    return False


def _place(card: int | None) -> str:
    return "in host memory" if card is None else f"on card {card}"


def _cuda(where: str) -> ModuleType:
    try:
        from ringreduce.devices import cuda
    except ImportError as error:
        raise ImportError(
            f"{where}: the array lives on a card; pip install 'ringreduce[gpu]' ({error})"
        ) from None
    return cuda
