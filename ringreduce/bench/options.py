"""The options of the command line: the flags of nccl-tests, and a few of our own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringreduce.algorithms import parse
from ringreduce.bench.collectives import COLLECTIVES
from ringreduce.bench.inputs import OPS, refusal
from ringreduce.errors import did_you_mean
from ringreduce.picture.output import SUFFIXES

_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "char": "int8",
    "uchar": "uint8",
    "int": "int32",
    "uint": "uint32",
}
_OPS = {"avg": "mean"}


@dataclass(frozen=True)
class Options:
    collective: str
    algorithm: str
    min_bytes: int
    max_bytes: int
    factor: int
    warmup: int
    iterations: int
    checks: int
    op: str
    dtype: str
    baselines: bool
    wide: bool
    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix not in SUFFIXES:
            raise ValueError(f"--plot {self.plot}: wanted a name that ends in .svg or .png")
        if self.algorithm != "auto":
            parse(self.collective, self.algorithm)
        if wrong := refusal(self.op, np.dtype(self.dtype)):
            raise ValueError(wrong)
        if self.min_bytes > self.max_bytes:
            raise ValueError(f"-b {self.min_bytes} is more than -e {self.max_bytes}")
        if self.min_bytes < self.itemsize:
            raise ValueError(f"-b {self.min_bytes} is less than an element of {self.dtype}")
        for flag, value, least in (
            ("-f", self.factor, 2),
            ("-w", self.warmup, 0),
            ("--iters", self.iterations, 1),
            ("-c", self.checks, 0),
        ):
            if value < least:
                raise ValueError(f"{flag} is {value}; wanted at least {least}")

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def redop(self) -> str:
        """The op that combines elements of different ranks; "none" where they are only moved."""
        return self.op if COLLECTIVES[self.collective].reduces else "none"

    def counts(self, ranks: int) -> list[int]:
        """The lengths to measure, in elements: each a whole number for every rank."""
        if not COLLECTIVES[self.collective].moves:
            return [1]
        step = ranks if COLLECTIVES[self.collective].divided else 1
        counts, nbytes = [], self.min_bytes
        while nbytes <= self.max_bytes:
            counts.append(max(step, nbytes // self.itemsize // step * step))
            nbytes *= self.factor
        return list(dict.fromkeys(counts))


def read(argv: Sequence[str], prog: str) -> Options:
    """Read a command line, without MPI.

    Raises SystemExit after printing an error (code 2) or help.
    """
    command_line = parser(prog)
    given, unknown = command_line.parse_known_args(argv)
    if unknown:
        meant = did_you_mean(unknown[0], command_line._option_string_actions)
        command_line.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    try:
        return Options(**vars(given))
    except ValueError as error:
        command_line.error(str(error))


def parser(prog: str) -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog=prog,
        description="Time a collective, beside MPI's own and Gloo's where torch is installed.",
        allow_abbrev=False,
    )
    add = command_line.add_argument
    names = ", ".join(COLLECTIVES)
    add(
        "--collective",
        type=_collective,
        choices=tuple(COLLECTIVES),
        default="all_reduce",
        metavar="NAME",
        help=names,
    )
    add("--algorithm", default="auto", metavar="NAME", help="default: auto, chosen for each size")
    add("-b", dest="min_bytes", type=nbytes, default=8, metavar="BYTES", help="from; default: 8")
    add("-e", dest="max_bytes", type=nbytes, default=64 << 20, metavar="BYTES", help="to; 64M")
    add("-f", dest="factor", type=int, default=2, metavar="N", help="from size to size; default: 2")
    add("-w", dest="warmup", type=int, default=5, metavar="N", help="untimed calls; default: 5")
    add("--iters", dest="iterations", type=int, default=20, metavar="N", help="timed; default: 20")
    add("-c", dest="checks", type=int, default=1, metavar="N", help="results to verify; default: 1")
    add(
        "-o",
        dest="op",
        type=_op,
        choices=(*OPS, *_OPS),
        default="sum",
        metavar="OP",
        help=f"{', '.join(OPS)}; or avg",
    )
    add("-d", dest="dtype", type=_dtype, default="float32", metavar="TYPE", help="default: float32")
    add("--no-peers", dest="baselines", action="store_false", help="time ringreduce alone")
    add("--wide", action="store_true", help="show all columns, more than 100 characters a line")
    add("--json", type=Path, metavar="FILE", help="write a row a measurement, with the environment")
    add("--plot", type=Path, metavar="FILE", help="draw it: .svg, or .png with 'ringreduce[plot]'")
    return command_line


def nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; wanted one such as 8, 64K or 1G")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


def _dtype(text: str) -> str:
    name = _DTYPES.get(text, text)
    try:
        import ml_dtypes  # noqa: F401  # names bfloat16

        return np.dtype(name).name
    except TypeError:
        raise argparse.ArgumentTypeError(
            f"unknown dtype {text!r}; wanted one such as float"
        ) from None


def _op(text: str) -> str:
    return _known("op", _OPS.get(text, text), OPS, (*OPS, *_OPS))


def _collective(text: str) -> str:
    return _known("collective", text, COLLECTIVES, COLLECTIVES)


def _known(what: str, name: str, names: Iterable[str], near: Iterable[str]) -> str:
    if name in names:
        return name
    meant = did_you_mean(name, near, {"average": "avg"})
    raise argparse.ArgumentTypeError(
        f"unknown {what} {name!r}; choose one of {', '.join(names)}{meant}"
    )
