"""A picture shows every message once, in its colours and place, and nothing is cut off."""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.errors import ScheduleError
from ringreduce.picture import to_png, to_svg
from ringreduce.picture.layout import StepColumns
from ringreduce.picture.legend import in_parts
from ringreduce.picture.style import PALETTE, in_dark, in_light
from ringreduce.schedules.matching import match
from ringreduce.schedules.schedule import Schedule, chunk_text
from tests.support.pictures import Box, box, contrasts, groups, number, parse, shapes, whole
from tests.support.schedules import any_schedule, two_shot
from tests.support.strategies import EVERY_ALGORITHM, block_layout, layouts, steps_of, written

Nodes = list[list[int]]
UNEVEN = block_layout(3, 1, 4)


def hierarchical(nodes: Nodes) -> Schedule:
    return build("all_reduce", "hierarchical", nodes)


# --- reading a picture ----------------------------------------------------------------------------


def read(schedule: Schedule, nodes: Nodes | None = None) -> ET.Element:
    return parse(to_svg(schedule, nodes))


def line_of(message: ET.Element) -> ET.Element:
    return next(message.iter("path"))


def ends_of(message: ET.Element) -> tuple[float, float, float, float]:
    """Return the ends of a message's line: x1, y1, x2, y2."""
    numbers = [float(word) for word in re.findall(r"-?[\d.]+", line_of(message).get("d", ""))]
    return numbers[0], numbers[1], numbers[-2], numbers[-1]


def bars(picture: ET.Element) -> dict[int, list[Box]]:
    return {
        int(rank.get("data-rank", "")): [box(rect) for rect in rank.iter("rect")]
        for rank in groups(picture, "rank")
    }


def sent(schedule: Schedule) -> Counter[tuple[int, int, str, str]]:
    """Count the schedule's messages by sender, receiver, chunks and kind."""
    return Counter(
        (
            message.sender.rank,
            message.receiver.rank,
            " ".join(map(chunk_text, message.chunks)),
            "reduce" if message.reduce else "overwrite",
        )
        for message in match(steps_of(schedule))
    )


def drawn(picture: ET.Element) -> Counter[tuple[int, int, str, str]]:
    return Counter(
        (
            int(message.get("data-sender", "")),
            int(message.get("data-receiver", "")),
            message.get("data-chunks", ""),
            message.get("class", "").removeprefix("message "),
        )
        for message in groups(picture, "message")
    )


# --- any picture ----------------------------------------------------------------------------------


def assert_true_and_in_sight(schedule: Schedule, nodes: Nodes | None) -> None:
    picture = read(schedule, nodes)
    assert drawn(picture) == sent(schedule)
    assert all(whole(picture).holds(shape) for shape in shapes(picture))
    every = [bar for lane in bars(picture).values() for bar in lane]
    assert not any(a.meets(b) for a, b in combinations(every, 2))
    for message in groups(picture, "message"):
        assert_it_runs_from_lane_to_lane(message, bars(picture))


def assert_it_runs_from_lane_to_lane(message: ET.Element, lanes: dict[int, list[Box]]) -> None:
    x1, y1, x2, y2 = ends_of(message)
    for x, y, end in ((x1, y1, "data-sender"), (x2, y2, "data-receiver")):
        lane = lanes[int(message.get(end, ""))]
        assert any(bar.holds(Box(x, y, x, y)) for bar in lane)
    assert x1 < x2


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
@given(layouts(max_nodes=4, max_ranks=9), st.booleans())
@settings(max_examples=8)
def test_every_message_of_every_algorithm_is_an_arrow_in_sight(
    collective: str, algorithm: str, nodes: Nodes, framed: bool
) -> None:
    assert_true_and_in_sight(build(collective, algorithm, nodes), nodes if framed else None)


@given(any_schedule())
@settings(max_examples=30)
def test_so_is_every_message_of_any_schedule(schedule: Schedule) -> None:
    assert_true_and_in_sight(schedule, None)


def test_an_arrow_too_few_would_be_noticed() -> None:
    schedule = hierarchical(UNEVEN)
    picture = read(schedule, UNEVEN)
    picture.remove(groups(picture, "message")[0])
    assert drawn(picture) != sent(schedule)


def test_what_is_out_of_sight_would_be_noticed() -> None:
    picture = read(hierarchical(UNEVEN), UNEVEN)
    less = Box(0, 0, number(picture, "width") - 30, number(picture, "height"))
    assert not all(less.holds(shape) for shape in shapes(picture))


def test_labels_do_not_overlap() -> None:
    picture = read(hierarchical(UNEVEN), UNEVEN)
    labels = [
        box(g[0]) for g in picture.iter("g") if [child.tag for child in g] == ["rect", "text"]
    ]
    labels = [label for label in labels if label.bottom - label.top < 20]
    assert len(labels) == len(groups(picture, "message"))
    assert not any(a.meets(b) for a, b in combinations(labels, 2))


def test_where_there_is_no_room_there_are_no_labels() -> None:
    assert to_svg(two_shot(30)).count('rx="4"') == len(PALETTE)  # the legend's


@pytest.mark.slow
def test_a_large_schedule_is_drawn_whole() -> None:
    nodes = block_layout(*[8] * 8)
    svg = to_svg(build("all_reduce", "ring", nodes), nodes)
    assert len(ET.fromstring(svg)) > 8064
    assert svg.count('class="message ') == 64 * 126
    assert len(svg) < 8 << 20


def test_one_rank_has_no_steps_and_still_a_picture() -> None:
    assert_true_and_in_sight(build("all_reduce", "ring", [[0]]), [[0]])


def test_what_names_say_is_escaped() -> None:
    schedule = replace(build("all_reduce", "ring", [[0, 1]]), algorithm="<a> & b")
    titles = [text.text or "" for text in read(schedule).iter("text")]
    assert titles[0].startswith("all_reduce · <a> & b: ")


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0, 1, 2, 2]], [[0], [1], [3]]], ids=str)
def test_nodes_that_do_not_list_the_ranks_are_refused(nodes: Nodes) -> None:
    with pytest.raises(ValueError, match="do not list ranks 0 to 2 once"):
        to_svg(build("all_reduce", "ring", [[0, 1, 2]]), nodes)


def test_a_schedule_that_cannot_finish_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        to_svg(written("rank 0\n <1:0\n >1:0\nrank 1\n <0:0\n >0:0"))


MODULES = ("", ".bars", ".chart", ".drawing", ".lanes", ".layout", ".legend", ".scales", ".style")


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_docstrings_are_true(module: str) -> None:
    tested = doctest.testmod(importlib.import_module(f"ringreduce.picture{module}"))
    assert tested.attempted > 0
    assert tested.failed == 0


# --- colours, kinds, frames -----------------------------------------------------------------------


def test_an_arrow_has_the_colour_of_its_chunk() -> None:
    painted: dict[str, set[str]] = {}
    for message in groups(read(build("all_reduce", "ring", block_layout(8))), "message"):
        stroke = line_of(message).get("stroke", "")
        painted.setdefault(message.get("data-chunks", ""), set()).add(stroke)
    assert {int(chunk): paint for chunk, paint in painted.items()} == {
        chunk: {colour} for chunk, colour in enumerate(PALETTE)
    }


def test_an_arrow_of_several_colours_goes_through_them() -> None:
    picture = read(hierarchical(UNEVEN), UNEVEN)
    several = 0
    for message in groups(picture, "message"):
        chunks = [int(word) for word in message.get("data-chunks", "").split()]
        # Three chunks a rail: each of the three nodes reduces one of them.
        wanted = list(dict.fromkeys(PALETTE[chunk // 3] for chunk in chunks))
        paint = line_of(message).get("stroke", "")
        if len(wanted) > 1:
            name = paint.removeprefix("url(#").removesuffix(")")
            gradient = next(g for g in picture.iter("linearGradient") if g.get("id") == name)
            assert [stop.get("stop-color") for stop in gradient] == wanted
            several += 1
        else:
            assert paint == wanted[0]
    assert several > 20


def colours_of_arrows(picture: ET.Element) -> set[str]:
    """Return the colours of all arrows, with those of the gradients along them."""
    strokes = {line_of(message).get("stroke", "") for message in groups(picture, "message")}
    stops = {stop.get("stop-color", "") for stop in picture.iter("stop")}
    return stops | {stroke for stroke in strokes if not stroke.startswith("url(#")}


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "torus", "hierarchical"])
@pytest.mark.parametrize("nodes", [block_layout(16), block_layout(*[8] * 4), UNEVEN], ids=len)
def test_arrows_have_colours_of_the_palette_alone(algorithm: str, nodes: Nodes) -> None:
    found = colours_of_arrows(read(build("all_reduce", algorithm, nodes), nodes))
    assert len(found) > 1
    assert found <= set(PALETTE)


def test_chunks_of_one_rail_share_a_colour() -> None:
    nodes = block_layout(4, 4)
    messages = groups(read(hierarchical(nodes), nodes), "message")
    rails: dict[str, set[int]] = {}
    for message in messages:
        ends = [int(message.get(f"data-{end}", "")) for end in ("sender", "receiver")]
        if ends[0] // 4 != ends[1] // 4:
            rails.setdefault(line_of(message).get("stroke", ""), set()).add(ends[0] % 4)
    assert rails == {colour: {local} for local, colour in enumerate(PALETTE[:4])}


@pytest.mark.parametrize("chunks", [1, 7, 8, 9, 100])
def test_neighbouring_chunks_share_colours_where_there_are_more_than_eight(chunks: int) -> None:
    numbers = in_parts(chunks)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(min(chunks, 8)))


def test_messages_without_the_chunk_that_is_followed_are_faded() -> None:
    picture = parse(to_svg(hierarchical(UNEVEN), UNEVEN, follow=4))
    messages = groups(picture, "message")
    faded = {m.get("opacity") is not None: m.get("data-chunks", "").split() for m in messages}
    assert faded.keys() == {True, False}
    for message in messages:
        has_it = "4" in message.get("data-chunks", "").split()
        assert (message.get("opacity") is None) == has_it
        assert has_it <= (line_of(message).get("stroke") == PALETTE[1])


def test_messages_with_the_chunk_that_is_followed_are_in_front() -> None:
    messages = groups(parse(to_svg(hierarchical(UNEVEN), UNEVEN, follow=4)), "message")
    faded = [message.get("opacity") is not None for message in messages]
    assert faded == sorted(faded, reverse=True)


def test_a_chunk_that_is_not_there_cannot_be_followed() -> None:
    with pytest.raises(ValueError, match="there is no chunk 18 of 18"):
        to_svg(hierarchical(UNEVEN), UNEVEN, follow=18)


@pytest.mark.parametrize("page", [in_light, in_dark])
@pytest.mark.parametrize("follow", [None, 0])
def test_texts_can_be_read(page: Callable[[str], str], follow: int | None) -> None:
    picture = parse(page(to_svg(hierarchical(UNEVEN), UNEVEN, follow)))
    assert min(value for _, value in contrasts(picture)) >= 4.5


@pytest.mark.parametrize(
    ("algorithm", "nodes", "finding"),
    [
        ("ring", [[0]], "nothing is sent"),
        ("ring", None, "each rank sends 1.5 times the array in 6 steps"),
        ("star", None, "the busiest rank sends 3 times the array in 2 steps"),
        ("ring", [[0, 1], [2, 3]], "3 times the array crosses between nodes, in 6 steps"),
        ("hierarchical", [[0, 1], [2, 3]], "2 times the array crosses between nodes, in 4 steps"),
    ],
)
def test_the_title_says_what_is_sent(algorithm: str, nodes: Nodes | None, finding: str) -> None:
    schedule = build("all_reduce", algorithm, nodes or [[0, 1, 2, 3]])
    title = next(read(schedule, nodes).iter("title"))
    assert title.text == f"all_reduce · {algorithm}: {finding}"


def test_a_copy_has_the_colour_of_its_chunk_and_every_fold_is_marked() -> None:
    schedule = build("all_reduce", "hierarchical(ring, allgather_reduce)", UNEVEN)
    picture = read(schedule, UNEVEN)
    copies = [m for m in groups(picture, "message") if "@" in m.get("data-chunks", "")]
    alone = [m for m in copies if " " not in m.get("data-chunks", "")]
    assert alone
    for message in alone:
        chunk = int(message.get("data-chunks", "").partition("@")[0])
        assert line_of(message).get("stroke") == PALETTE[chunk]
    wanted = [
        f"rank {rank}, step {number}: all copies of "
        for rank, steps in enumerate(steps_of(schedule))
        for number, step in enumerate(steps)
        if step.folds
    ]
    titles = [fold.findtext("title") for fold in groups(picture, "fold")]
    assert wanted
    assert all(title.startswith(words) for title, words in zip(titles, wanted, strict=True))


def test_what_is_added_in_is_solid_and_has_a_plus() -> None:
    for message in groups(read(hierarchical(UNEVEN)), "reduce"):
        assert line_of(message).get("stroke-dasharray") is None
        assert len(list(message.iter("circle"))) == 1


def test_what_replaces_is_dashed_and_has_a_hollow_head() -> None:
    for message in groups(read(hierarchical(UNEVEN)), "overwrite"):
        line, head = message.iter("path")
        assert line.get("stroke-dasharray")
        assert (head.get("fill"), head.get("stroke")) == ("#ffffff", line.get("stroke"))


def test_pointing_at_an_arrow_tells_what_it_is() -> None:
    said = [message.findtext("title") for message in groups(read(two_shot(2)), "message")]
    assert said == [
        "rank 0, step 0, to rank 1, step 0: chunk 1 is added in",
        "rank 1, step 0, to rank 0, step 0: chunk 0 is added in",
        "rank 0, step 1, to rank 1, step 1: chunk 0 replaces",
        "rank 1, step 1, to rank 0, step 1: chunk 1 replaces",
    ]


@pytest.mark.parametrize("nodes", [UNEVEN, [[3, 0], [1, 5, 2], [4]]], ids=str)
def test_a_frame_holds_the_ranks_of_its_node_and_no_others(nodes: Nodes) -> None:
    picture = read(hierarchical(nodes), nodes)
    frames = [box(next(frame.iter("rect"))) for frame in groups(picture, "node")]
    lanes = bars(picture)
    held = [
        [r for r in node if all(f.holds(bar) for bar in lanes[r])]
        for f, node in zip(frames, nodes, strict=True)
    ]
    assert held == nodes
    assert not any(a.meets(b) for a, b in combinations(frames, 2))


def test_without_nodes_there_are_no_frames() -> None:
    assert groups(read(hierarchical(UNEVEN)), "node") == []


# --- time -----------------------------------------------------------------------------------------


def test_a_ring_goes_in_lockstep() -> None:
    timeline = StepColumns.of(build("all_reduce", "ring", block_layout(5)))
    assert timeline.in_lockstep
    assert all(column == message.sender.step for message, column in timeline.messages.items())


def test_a_rank_alone_on_its_node_waits_for_the_others() -> None:
    timeline = StepColumns.of(hierarchical(UNEVEN))
    assert not timeline.in_lockstep
    assert timeline.borders[3] == [0, 4, 5, 6, 7]
    assert timeline.borders[0] == [0, 1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.slow
@given(any_schedule())
@settings(max_examples=50)
def test_a_message_lies_within_the_steps_of_both_its_ranks(schedule: Schedule) -> None:
    timeline = StepColumns.of(schedule)
    for message, column in timeline.messages.items():
        for rank, step in (message.sender, message.receiver):
            begin, end = timeline.borders[rank][step : step + 2]
            assert begin <= column < end


# --- PNG and docs ---------------------------------------------------------------------------------


def png_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_a_png_is_twice_as_large_as_the_svg() -> None:
    pytest.importorskip("resvg_py")
    schedule = hierarchical(UNEVEN)
    picture = read(schedule, UNEVEN)
    wide, high = png_size(to_png(schedule, UNEVEN))
    assert wide == pytest.approx(2 * number(picture, "width"), abs=1)
    assert high == pytest.approx(2 * number(picture, "height"), abs=1)


def test_a_png_is_drawn_without_the_style_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that draws PNGs may know no media queries, or take one for true."""
    resvg_py = pytest.importorskip("resvg_py")
    drawn = []
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda svg_string, **_: drawn.append(svg_string))
    to_png(two_shot(2))
    assert drawn == [in_light(to_svg(two_shot(2)))]
    assert "<style>" not in drawn[0]


def test_a_large_png_is_bounded() -> None:
    pytest.importorskip("resvg_py")
    long = written("rank 0\n" + " >1:0\n" * 120 + "rank 1\n" + " <0:0\n" * 120)
    assert max(png_size(to_png(long))) == 8192


def test_a_png_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    monkeypatch.setitem(sys.modules, "matplotlib", sys)
    with pytest.raises(ImportError, match=r"pip install 'ringreduce\[plot\]'"):
        to_png(two_shot(2))
