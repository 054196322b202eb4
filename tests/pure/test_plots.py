"""SVG plots: well-formed, within their box, with round ticks."""

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain import plots

FINITE = st.floats(-1e6, 1e6)


def svg_of(markup: str) -> ElementTree.Element:
    svg = ElementTree.fromstring(f"<div>{markup}</div>").find("svg")
    assert svg is not None
    return svg


@given(FINITE, st.floats(1e-6, 1e6))
def test_ticks_are_round_and_inside(low: float, span: float):
    found = plots.ticks(low, low + span)
    assert 1 <= len(found) <= 12
    assert all(low - 1e-6 * (abs(low) + span) <= t <= low + span + 1e-6 * (abs(low) + span) for t in found)


def test_known_ticks():
    assert plots.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert plots.ticks(2.31, 5.6) == [3.0, 4.0, 5.0]
    assert plots.ticks(1, 1) == [1]


@given(st.lists(st.one_of(FINITE, st.just(math.nan)), max_size=1500), st.booleans())
def test_any_values_give_a_chart_inside_its_box(values: list[float], zero: bool):
    markup = plots.line_chart([plots.Series("a <b>", range(len(values)), values, "c1")], "x", "y", zero=zero)
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        assert "<svg" not in markup
        return
    svg = svg_of(markup)
    for path in svg.findall("path"):
        points = path.attrib["d"].removeprefix("M").split("L")
        assert len(points) <= 400
        assert all(0 <= float(p.split()[0]) <= plots.WIDTH for p in points)
        if not zero:
            assert all(0 <= float(p.split()[1]) <= 260 for p in points)


def test_timeline_has_a_rectangle_for_each_bar_and_escapes_words():
    bars = [plots.Bar(0, 1, "F", "0", "0F0: 1 s"), plots.Bar(1, 3, "wait", "", "waits for <h>")]
    svg = svg_of(plots.timeline([("0: attic", bars), ("1: cellar", [])], 4.0, [("forward", "F")]))
    drawn = [r for r in svg.findall("rect") if "bar" in r.attrib["class"]]
    assert [float(r.attrib["width"]) for r in drawn] == pytest.approx([181, 362], abs=0.1)
    assert [r.findtext("title") for r in drawn] == ["0F0: 1 s", "waits for <h>"]


def test_stacked_bars_add_up():
    svg = svg_of(plots.stacked_bars([("a", {"x": 1.0, "y": 3.0})], "s", [("x", "F"), ("y", "B")]))
    first, second = (r for r in svg.findall("rect"))
    assert float(second.attrib["width"]) == pytest.approx(3 * float(first.attrib["width"]), abs=0.1)
    assert float(second.attrib["x"]) == pytest.approx(float(first.attrib["x"]) + float(first.attrib["width"]), abs=0.1)
