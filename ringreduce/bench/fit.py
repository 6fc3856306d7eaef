"""Fit the cost model to a run: the alpha, beta and gamma under which it predicts the times best.

For given costs the price of a schedule is a sum of alphas, of bytes sent times beta and of bytes
folded times gamma along its critical path, so it is linear where that path stays the same.  Each
step of the fit solves the linear problem at the present path, weighted so that relative errors
count: 10 % at eight bytes is as bad as 10 % at a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringreduce.schedules.cost import Link, Profile

Point = tuple[int, float]
"""(bytes, seconds)"""
Price = Callable[[int, Profile], float]
"""(bytes, profile) -> seconds, in proportion to the profile."""

_STEPS = 30
_STEP = 1e-4
"""Relative change of a parameter to measure its cost."""


@dataclass(frozen=True)
class Fit:
    profile: Profile
    fitted: tuple[Point, ...]
    """(bytes, predicted seconds) of the sizes that the profile was fitted to."""
    checked: tuple[Point, ...]
    """(bytes, predicted seconds) of the other sizes."""
    error: float
    """Median relative error at the sizes that the profile was fitted to."""
    error_checked: float


def fit(points: Sequence[Point], folds: Sequence[Point], price: Price, across: bool) -> Fit:
    """Fit a profile to the 1st, 3rd, ... of `points`, and check it on the points between.

    `folds` are (bytes of each array, seconds) of adding in one rank: they separate beta from
    gamma.  `across`: the ranks are on several nodes, and both kinds of links are fitted.
    """
    used, others = points[::2], points[1::2]
    start = Profile(Link(1e-6, 1e-10), Link(1e-5, 1e-9), 1e-10)
    values = np.array(_values(start, across))
    for _ in range(_STEPS):
        rows, seconds = _linear(used, folds, price, values, across)
        values = np.maximum(_solved(rows, seconds), 1e-15)
    profile = _profile(values, across)
    fitted = tuple((nbytes, price(nbytes, profile)) for nbytes, _ in used)
    checked = tuple((nbytes, price(nbytes, profile)) for nbytes, _ in others)
    return Fit(profile, fitted, checked, _error(used, fitted), _error(others, checked))


def profile_text(profile: Profile, across: bool, shared: bool) -> list[str]:
    """Return the lines of the Python expression of what was fitted, with three digits.

    `across`: the ranks are on several nodes.  `shared`: they share memory.
    """

    def link_text(link: Link) -> str:
        copies = ", receiver_copies=True" * link.receiver_copies
        costs = f"alpha_s={link.alpha_s:.3g}, beta_s_per_byte={link.beta_s_per_byte:.3g}"
        return f"Link({costs}{copies})"

    gamma = f"{profile.gamma_s_per_byte:.3g}"
    if shared:
        link = link_text(profile.also_in_memory().in_memory)
        fields = {"in_memory": link, "gamma_in_memory_s_per_byte": gamma, "crowded_s": "0.0"}
    else:
        fields = {"in_node": link_text(profile.in_node), "gamma_s_per_byte": gamma}
    if across:
        fields["between_nodes"] = link_text(profile.between_nodes)
    return ["Profile(", *(f"    {name}={text}," for name, text in fields.items()), ")"]


def _linear(
    points: Sequence[Point],
    folds: Sequence[Point],
    price: Price,
    values: np.ndarray,
    across: bool,
) -> tuple[np.ndarray, np.ndarray]:
    rows = []
    for nbytes, _ in points:
        here = price(nbytes, _profile(values, across))
        row = []
        for index, value in enumerate(values):
            moved = values.copy()
            moved[index] = value * (1 + _STEP)
            row.append((price(nbytes, _profile(moved, across)) - here) / (value * _STEP))
        rows.append(row)
    for nbytes, _ in folds:
        rows.append([0.0] * (len(values) - 1) + [float(nbytes)])
    return np.array(rows), np.array([seconds for _, seconds in (*points, *folds)])


def _solved(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    weighted, wanted = rows / seconds[:, None], np.ones(len(seconds))
    kept = list(range(rows.shape[1]))
    values = np.zeros(rows.shape[1])
    while kept:
        part = weighted[:, kept]
        scale = np.linalg.norm(part, axis=0)
        scale[scale == 0] = 1.0
        solution = np.linalg.lstsq(part / scale, wanted, rcond=None)[0] / scale
        if (solution >= 0).all():
            values[kept] = solution
            break
        del kept[int(np.argmin(solution * scale))]
    return values


def _values(profile: Profile, across: bool) -> list[float]:
    links = [profile.in_node, profile.between_nodes] if across else [profile.in_node]
    return [v for link in links for v in (link.alpha_s, link.beta_s_per_byte)] + [
        profile.gamma_s_per_byte
    ]


def _profile(values: np.ndarray, across: bool) -> Profile:
    links = [Link(float(values[i]), float(values[i + 1])) for i in range(0, len(values) - 1, 2)]
    made = Profile(links[0], gamma_s_per_byte=float(values[-1]))
    return replace(made, between_nodes=links[1]) if across else made


def _error(measured: Sequence[Point], predicted: Sequence[Point]) -> float:
    if not measured:
        return 0.0
    pairs = zip(predicted, measured, strict=True)
    return float(np.median([abs(p / m - 1) for (_, p), (_, m) in pairs]))
