"""Plots as inline SVG: line charts, a pipeline timeline, stacked bars. Pure.

Colors and fonts are classes and variables of the page that embeds them (`report`), so that one plot suits light and
dark. Lengths are in the SVG's own units, about a CSS pixel.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 40
_MAX_POINTS = 400
"""More points than this are averaged in groups: a plot has no more pixels to show them."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line (or, with `dots`, points) named in the legend; `css` chooses its color."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    css: str
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of a timeline: what it shows (`css`), the words on it and those that pointing at it shows."""

    start_s: float
    end_s: float
    css: str
    label: str
    title: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) within `[low, high]`."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's label."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def line_chart(series: Sequence[Series], x_label: str, y_label: str, height: int = 260, zero: bool = False) -> str:
    """Lines over a common x axis. `zero`: the y axis starts at 0. Values that are not finite are left out."""
    thin = [_thinned(s) for s in series]
    xs = [x for s in thin for x in s.xs]
    ys = [y for s in thin for y in s.ys]
    if not xs:
        return '<p class="note">Nothing was measured.</p>'
    x = _Scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    low, high = (0.0 if zero else min(ys)), max(ys)
    margin = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    y = _Scale(low if zero else low - margin, high + margin, height - _BOTTOM, _TOP)
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{number(t)}</text>'
        for t in ticks(y.low, y.high)
    ]
    parts += _x_axis(x, height, x_label)
    parts.append(
        f'<text class="tick" transform="rotate(-90)" x="{-(_TOP + height - _BOTTOM) / 2:.0f}" y="14" '
        f'text-anchor="middle">{escape(y_label)}</text>'
    )
    for s in thin:
        points = [(x(a), y(b), a, b) for a, b in zip(s.xs, s.ys, strict=True)]
        if not s.dots and len(points) > 1:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py, _, _ in points)
            parts.append(f'<path class="line {s.css}" d="{path}"/>')
        else:
            parts += [
                f'<circle class="dot {s.css}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                f"<title>{escape(s.name)}: {b:.4g} at {a:g}</title></circle>"
                for px, py, a, b in points
            ]
    return _svg(parts, height) + _legend([(s.name, s.css) for s in thin])


def timeline(rows: Sequence[tuple[str, Sequence[Bar]]], seconds: float, legend: Sequence[tuple[str, str]]) -> str:
    """Who did what when: a row of bars a name, over one time axis that ends at `seconds`."""
    row_height, left = 34, 120
    height = _TOP + row_height * len(rows) + _BOTTOM
    x = _Scale(0.0, max(seconds, 1e-9), left, WIDTH - _RIGHT)
    parts: list[str] = []
    for i, (name, bars) in enumerate(rows):
        top = _TOP + row_height * i
        parts.append(f'<text class="name" x="{left - 10}" y="{top + 20}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="lane" x="{left}" y="{top + 3}" width="{x.b - left}" height="{row_height - 6}"/>')
        for bar in bars:
            start, width = x(bar.start_s), x(bar.end_s) - x(bar.start_s)
            parts.append(
                f'<rect class="bar {bar.css}" x="{start:.2f}" y="{top + 3}" width="{max(width, 0.4):.2f}" '
                f'height="{row_height - 6}"><title>{escape(bar.title)}</title></rect>'
            )
            if bar.label and width > 8 * len(bar.label):
                parts.append(
                    f'<text class="on" x="{start + width / 2:.1f}" y="{top + 21}" text-anchor="middle">'
                    f"{escape(bar.label)}</text>"
                )
    parts += _x_axis(x, height, "seconds since the step began")
    return _svg(parts, height) + _legend(legend)


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, legend: Sequence[tuple[str, str]]) -> str:
    """A bar a name, made of parts; the legend's (name, css) pairs give their order and colors."""
    row_height, left = 30, 120
    height = _TOP + row_height * len(rows) + _BOTTOM
    total = max((sum(parts.values()) for _, parts in rows), default=0.0)
    x = _Scale(0.0, max(total, 1e-9), left, WIDTH - _RIGHT)
    out: list[str] = []
    for i, (name, parts) in enumerate(rows):
        top, at = _TOP + row_height * i, 0.0
        out.append(f'<text class="name" x="{left - 10}" y="{top + 18}" text-anchor="end">{escape(name)}</text>')
        for part, css in legend:
            value = parts.get(part, 0.0)
            if value > 0:
                out.append(
                    f'<rect class="bar {css}" x="{x(at):.2f}" y="{top + 3}" width="{x(at + value) - x(at):.2f}" '
                    f'height="{row_height - 6}"><title>{escape(f"{name}: {part} {value:.3g} {unit}")}</title></rect>'
                )
                at += value
    out += _x_axis(x, height, unit)
    return _svg(out, height) + _legend(legend)


def standalone(plot: str, style: str) -> str:
    """A plot as a file of its own, with the page's style and without the legend below it."""
    body = plot.partition("</svg>")[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = body.partition(">")
    return f"{head}><style>{style}</style>{rest}</svg>\n"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps `[low, high]` to `[a, b]`."""

    low: float
    high: float
    a: float
    b: float

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.a + self.b) / 2
        return self.a + (value - self.low) / (self.high - self.low) * (self.b - self.a)


def _thinned(series: Series) -> Series:
    pairs = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    size = math.ceil(len(pairs) / _MAX_POINTS) or 1
    groups = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    xs = [sum(x for x, _ in group) / len(group) for group in groups]
    ys = [sum(y for _, y in group) / len(group) for group in groups]
    return Series(series.name, xs, ys, series.css, series.dots)


def _x_axis(x: _Scale, height: int, label: str) -> list[str]:
    parts = [f'<line class="axis" x1="{x.a}" x2="{x.b}" y1="{height - _BOTTOM}" y2="{height - _BOTTOM}"/>']
    parts += [
        f'<text class="tick" x="{x(t):.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{number(t)}</text>'
        for t in ticks(x.low, x.high, 8)
    ]
    middle = (x.a + x.b) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{height - 6}" text-anchor="middle">{escape(label)}</text>')
    return parts


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{css}"></i>{escape(name)}</li>' for name, css in entries)
    return f'<ul class="legend">{items}</ul>'
