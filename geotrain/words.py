"""Numbers as people read them: times, sizes, counts, and a series as one line of bars. Pure."""

from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """Values as one line of bars, newest at the right, means where there are more values than characters."""
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in means)


def duration(seconds: float) -> str:
    """A time span for people: `0.42 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def count(number: int) -> str:
    """A count for people: `950`, `2.1 k`, `3.3 M`, `1.1 B`."""
    for limit, divisor, unit in ((10**3, 1, ""), (10**6, 10**3, " k"), (10**9, 10**6, " M")):
        if number < limit:
            return f"{number / divisor:.3g}{unit}"
    return f"{number / 10**9:.3g} B"


def number_of(what: str, number: int) -> str:
    """`1 peer`, `2 peers`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
