"""Draw schedules and measurements as pictures for light and dark pages.

In the picture of a schedule time runs to the right, a lane is a rank, and an arrow is a message.
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
from ringreduce.picture.output import to_pixels
from ringreduce.schedules.schedule import Schedule


def to_svg(
    schedule: Schedule, nodes: Sequence[Sequence[int]] | None = None, follow: int | None = None
) -> str:
    """Return the picture as an SVG document with a background of its own, light or dark.

    `nodes` lists the ranks of each node, every rank once: a frame is drawn around each node.
    `follow` is the number of a chunk: messages without it are faded.
    Raises ScheduleError if the schedule cannot finish, and ValueError if the nodes do not list its
    ranks or there is no such chunk.
    """
    return Drawing(schedule, nodes, follow).svg()


def to_png(
    schedule: Schedule, nodes: Sequence[Sequence[int]] | None = None, follow: int | None = None
) -> bytes:
    """Return the picture as a PNG file in light colours.

    A unit of the SVG becomes two pixels; the longer side has at most 8192.  Raises the errors of
    `to_svg`, and ImportError without the ``plot`` extra.
    """
    return to_pixels(to_svg(schedule, nodes, follow))
