"""Draw a schedule as a picture: time runs to the right, a lane is a rank, an arrow is a message.

An arrow has the colours of its chunks.  A solid arrow with a plus is a message that the receiver
reduces into its values; a dashed arrow with a hollow head is a message that overwrites them.  A bar
is one step of one rank.  The bar of a rank that waits for its peer is longer than a column.
Arrows and bars have tooltips.

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
    """Return the picture as an SVG document with a background of its own.

    `nodes` lists the ranks of each node, every rank once: a frame is drawn around each node.
    Raises ScheduleError if the schedule cannot finish, and ValueError if the nodes do not list its
    ranks.
    """
    return Drawing(schedule, nodes).svg()


def to_png(schedule: Schedule, nodes: Sequence[Sequence[int]] | None = None) -> bytes:
    """Return the picture as a PNG file: two pixels for each unit of the SVG, 8192 a side at most.

    Raises the errors of `to_svg`, and ImportError without the ``plot`` extra.
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
    # Matplotlib's own font: then text is drawn on machines without fonts, and alike on all.
    png: bytes = resvg_py.svg_to_bytes(
        svg_string=drawing.svg(),
        width=round(zoom * drawing.width),
        skip_system_fonts=True,
        font_dirs=[f"{matplotlib.get_data_path()}/fonts/ttf"],
        sans_serif_family="DejaVu Sans",
    )
    return png
