"""Write a picture to a file: SVG needs nothing, PNG needs the ``plot`` extra."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import ModuleType

from ringreduce.picture.style import in_light

SUFFIXES = (".svg", ".png")
_NOT_IN_XML = re.compile("[\\0-\\x08\\x0b\\x0c\\x0e-\\x1f\\ud800-\\udfff\\ufffe\\uffff]")
"""Characters that a name of a file may have, but no XML."""
_PIXELS_A_UNIT, _MOST_PIXELS = 2.0, 8192


def check_writable(path: Path) -> None:
    """Raise OSError if a file cannot be written at `path`.  Makes no file."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    place = path if path.exists() else path.parent
    if not place.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def check(path: Path) -> None:
    """Raise ImportError, with the command to install it, if a picture at `path` needs a library."""
    if path.suffix == ".png":
        _libraries()


def write(path: Path, svg: str) -> None:
    """Write a picture as `path` ends: .png, or .svg.  Raises OSError, and the errors of `check`."""
    svg = _NOT_IN_XML.sub("?", svg)
    if path.suffix == ".png":
        path.write_bytes(to_pixels(svg))
    else:
        path.write_text(svg, encoding="utf-8")


def to_pixels(svg: str) -> bytes:
    """Return a picture of `document` as PNG, in light colours.

    A unit of the SVG becomes two pixels; the longer side has at most 8192.  Raises ImportError
    without the ``plot`` extra.
    """
    resvg_py, matplotlib = _libraries()
    width, height = (float(n) for n in re.findall(r' (?:width|height)="([\d.]+)"', svg)[:2])
    zoom = min(_PIXELS_A_UNIT, _MOST_PIXELS / max(width, height))
    # Matplotlib's own font: then text is drawn on machines without fonts, and alike on all.
    png: bytes = resvg_py.svg_to_bytes(
        svg_string=in_light(svg),
        width=round(zoom * width),
        skip_system_fonts=True,
        font_dirs=[f"{matplotlib.get_data_path()}/fonts/ttf"],
        sans_serif_family="DejaVu Sans",
    )
    return png


def _libraries() -> tuple[ModuleType, ModuleType]:
    try:
        import matplotlib
        import resvg_py
    except ImportError as error:
        raise ImportError(
            f"a PNG needs {error.name}: pip install 'ringreduce[plot]'; an SVG needs nothing"
        ) from None
    return resvg_py, matplotlib
