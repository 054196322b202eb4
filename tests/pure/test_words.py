"""Numbers as people read them."""

import pytest

from geotrain import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (0.42, "0.42 s"), (12.4, "12 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_for_people(seconds: float, text: str):
    assert words.duration(seconds) == text


def test_sizes_counts_and_sparklines():
    assert [words.size(n) for n in (12, 2048, 5 << 20, 3 << 30)] == ["12 B", "2 KiB", "5 MiB", "3 GiB"]
    assert [words.count(n) for n in (950, 2100, 3_300_000, 1_100_000_000)] == [
        "950",
        "2.1 k",
        "3.3 M",
        "1.1 B",
    ]
    assert words.sparkline([], 5) == "" and words.sparkline([1.0], 5) == "▁"
    line = words.sparkline([float(i) for i in range(100)], 10)
    assert len(line) == 10 and list(line) == sorted(line) and line[-1] == "█"
