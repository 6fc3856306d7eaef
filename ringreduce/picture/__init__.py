"""Draw a schedule as a picture: time runs to the right, a lane is a rank, an arrow a message.

An arrow has the colours of its chunks.  Solid with a plus it is added in; dashed with a hollow head
it replaces what is there.  A bar is one step of one rank; a rank whose peer is not there yet waits,
so that its bar is longer than a column.  Pointing at an arrow or a bar tells what it is.

>>> from ringreduce.algorithms import build
>>> svg = to_svg(build("all_reduce", "ring", nodes=[[0, 1, 2]]))
>>> svg.count('class="message reduce"'), svg.count('class="message overwrite"')
(6, 6)
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.picture.drawing import Drawing
from ringreduce.schedules.schedule import Schedule

_PIXELS_A_UNIT, _MOST_PIXELS = 2.0, 8192


def to_svg(schedule: Schedule, nodes: Sequence[Sequence[int]] | None = None) -> str:
    """The picture as an SVG document that brings its own background.

    `nodes` lists the ranks of each node, every rank once: each node gets a frame.  Raises
    ScheduleError when the schedule cannot finish, and ValueError when the nodes do not list its
    ranks.
    """
    return Drawing(schedule, nodes).svg()


def to_png(schedule: Schedule, nodes: Sequence[Sequence[int]] | None = None) -> bytes:
    """The picture as a PNG file: two pixels a unit of the SVG, but at most 8192 wide and high.

    Raises what `to_svg` raises, and ImportError without the ``plot`` extra.
    """
    try:
        import matplotlib
        import resvg_py
    except ImportError as error:
        raise ImportError(
            f"a PNG needs {error.name}: pip install 'ringreduce[plot]'; an SVG needs nothing"
        ) from error
    drawing = Drawing(schedule, nodes)
    zoom = min(_PIXELS_A_UNIT, _MOST_PIXELS / max(drawing.width, drawing.height))
    # Matplotlib brings the font: so there is text on a machine without fonts, the same on all.
    png: bytes = resvg_py.svg_to_bytes(
        svg_string=drawing.svg(),
        width=round(zoom * drawing.width),
        skip_system_fonts=True,
        font_dirs=[f"{matplotlib.get_data_path()}/fonts/ttf"],
        sans_serif_family="DejaVu Sans",
    )
    return png
