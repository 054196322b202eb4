"""The report of a run: one HTML file that needs nothing else, and the same facts as JSON. I/O (writes the two)."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .disk import write_atomic
from .facts import ACTIVITIES
from .plots import Bar, Series, line_chart, stacked_bars, timeline
from .words import count, duration, number_of, size

Facts = Mapping[str, Any]

_WORDS = {
    "compute": "computing",
    "rest": "resting (duty cap)",
    "sending": "waiting for a link",
    "waiting": "waiting for a peer",
    "commit": "commit and optimizer",
    "other": "other",
}

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --ink: #1d2125; --dim: #667079; --line: #e3e6e8;
  --c1: #2f6fde; --c2: #e0662b; --f: #4f8ae8; --b: #1f9d77; --wait: #f0c04a; --send: #e07b39; --rest: #b9a5e0;
  --commit: #9aa5b1; --other: #cfd5da; --on: #fff; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #e6e9ec; --dim: #97a1ab;
  --line: #2e3439; --c1: #6aa2ff; --c2: #ff9a62; --f: #3f78d1; --b: #1d8a69; --wait: #a8842b; --send: #b3602b;
  --rest: #7a68a8; --commit: #59636d; --other: #3d454c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 20px 64px; max-width: 940px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 10px; }
p { margin: 0 0 10px; } .note, .sub { color: var(--dim); } .sub { margin-bottom: 20px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; overflow-x: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, auto)); gap: 12px; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.cards b { display: block; font-size: 19px; white-space: nowrap; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards span { color: var(--dim); font-size: 13px; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; color: var(--dim); font-weight: 500; } th, td { padding: 5px 12px 5px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); } tr:last-child td { border-bottom: 0; }
th.r, td.r { text-align: right; white-space: nowrap; }
pre { margin: 0; white-space: pre-wrap; word-break: break-word; font: 13px/1.5 ui-monospace, Menlo, monospace; }
meter { width: 90px; } ul.log { margin: 0; padding-left: 18px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg .tick { fill: var(--dim); font-size: 11px; } svg .on { fill: var(--on); font-size: 11px; pointer-events: none; }
svg .grid { stroke: var(--line); } svg .axis { stroke: var(--dim); } svg .lane { fill: var(--line); opacity: .45; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; } .line.c1 { stroke: var(--c1); }
.line.c2 { stroke: var(--c2); } .bar { stroke: var(--card); stroke-width: .6; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 6px 0 0; padding: 0;
  color: var(--dim); font-size: 13px; } .legend i { display: inline-block; width: 11px; height: 11px;
  border-radius: 3px; margin-right: 6px; }
.c1 { fill: var(--c1); background: var(--c1); } .c2 { fill: var(--c2); background: var(--c2); }
.F, .compute { fill: var(--f); background: var(--f); } .B { fill: var(--b); background: var(--b); }
.wait, .waiting { fill: var(--wait); background: var(--wait); } .sending { fill: var(--send); background: var(--send); }
.rest { fill: var(--rest); background: var(--rest); } .commit { fill: var(--commit); background: var(--commit); }
.other { fill: var(--other); background: var(--other); }
"""


def write_report(path: Path, facts: Facts) -> None:
    """Writes the page. Raises `LocalError` if the disk refuses."""
    write_atomic(path, html(facts).encode())


def write_json(path: Path, facts: Facts) -> None:
    """Writes the facts as strict JSON (a number that is not finite becomes null). Raises `LocalError`."""
    write_atomic(path, json.dumps(_finite(facts), indent=1, allow_nan=False).encode())


def html(facts: Facts) -> str:
    """The whole page. `facts` are `facts.Recorder.facts`, with or without `run`, `sample`, `machine` and paths."""
    title = facts.get("run") or "geotrain: a run"
    sections = [
        _section("Loss", _loss(facts)),
        _section("Throughput", _throughput(facts)),
        _section("One step, by stage", _timeline(facts)),
        _section("Where a step's seconds went", _seconds(facts)),
        _section("Links", _links(facts)),
        _section("Bytes", _bytes(facts)),
        _section("Plan", _plan(facts)),
        _section("Text from the trained model", _sample(facts)),
        _section("What happened", _log(facts)),
        _section("Files and machine", _files(facts)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{_subtitle(facts)}{_cards(facts)}{''.join(sections)}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _subtitle(facts: Facts) -> str:
    done = facts["first_step"] - 1 + len(facts["losses"]) if facts["losses"] else 0
    stages = f"{len(facts['stages'])} stages, {facts['schedule']}" if facts["stages"] else "never planned"
    text = f"{facts['reason']} after {done} of {facts['steps']} steps in {duration(facts['seconds'])}; {stages}"
    return f'<p class="sub">{escape(text)}</p>'


def _cards(facts: Facts) -> str:
    before, after = facts["held_out_loss_before"], facts["held_out_loss_after"]
    cards: list[tuple[str, str]] = []
    if before is not None and after is not None:
        cards.append((f"{before:.3f} → {after:.3f}", f"held-out loss, {after / before - 1:+.0%}"))
    cards.append((f"{facts['tokens_per_second']:,.0f}", "tokens a second"))
    if facts["median_step_seconds"] is not None:
        cards.append((duration(facts["median_step_seconds"]), "a step (median)"))
    cards.append((count(facts["parameters"]), "parameters"))
    cards.append((f"{sum(p['stage'] is not None for p in facts['peers'])} of {len(facts['peers'])}", "peers at work"))
    items = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in cards)
    return f'<div class="cards">{items}</div>'


def _loss(facts: Facts) -> str:
    losses = [math.nan if loss is None else loss for loss in facts["losses"]]
    steps = [facts["first_step"] + i for i in range(len(losses))]
    held_out = facts["held_out_losses"]
    series = [Series("training", steps, losses, "c1")]
    if held_out:
        series.append(Series("held out", [s for s, _ in held_out], [loss for _, loss in held_out], "c2", dots=True))
    skipped = facts["skipped_steps"]
    note = f"Skipped, because a gradient was not finite: steps {', '.join(map(str, skipped))}." if skipped else ""
    return line_chart(series, "step", "nats a token") + (f'<p class="note">{note}</p>' if note else "")


def _throughput(facts: Facts) -> str:
    seconds = facts["step_seconds"]
    steps = [facts["first_step"] + i for i in range(len(seconds))]
    rates = [facts["tokens_per_step"] / s if s > 0 else math.nan for s in seconds]
    return line_chart([Series("tokens a second", steps, rates, "c1")], "step", "tokens a second", 200, zero=True)


def _timeline(facts: Facts) -> str:
    step = facts["timeline"]
    if step is None:
        return ""
    rows = [(f"{s['stage']}: {s['peer']}", [_bar(span) for span in s["spans"]]) for s in step["stages"]]
    legend = [
        ("forward", "F"),
        ("backward", "B"),
        ("waiting", "wait"),
        ("resting (duty cap)", "rest"),
        ("other", "other"),
    ]
    note = f"Step {step['step']}. Point at a bar to see what it was, or what was waited for and from whom."
    return f'<p class="note">{note}</p>' + timeline(rows, step["seconds"], legend)


def _bar(span: Mapping[str, Any]) -> Bar:
    activity, label = span["activity"], span["label"]
    length = duration(span["end_s"] - span["start_s"])
    if activity == "compute":
        kind = "F" if "F" in label else "B" if "B" in label else "other"
        return Bar(span["start_s"], span["end_s"], kind, label.partition(kind)[2], f"{label}: {length}")
    words = {"wait": f"waiting for {label}", "rest": f"resting after {label}"}.get(activity, f"{activity} {label}")
    css = activity if activity in ("wait", "rest") else "other"
    return Bar(span["start_s"], span["end_s"], css, "", f"{words}: {length}")


def _seconds(facts: Facts) -> str:
    steps = max(len(facts["losses"]), 1)
    rows = [
        (f"{p['stage']}: {p['name']}", {_WORDS[a]: s / steps for a, s in p["seconds_by_activity"].items()})
        for p in facts["peers"]
        if sum(p["seconds_by_activity"].values()) > 0
    ]
    if not rows:
        return ""
    used = [a for a in ACTIVITIES if any(parts[_WORDS[a]] > 0 for _, parts in rows)]
    chart = stacked_bars(rows, "seconds a step", [(_WORDS[a], a) for a in used])
    head = ["stage: peer", *(_WORDS[a] for a in used)]
    body = [[name, *(duration(parts[_WORDS[a]]) for a in used)] for name, parts in rows]
    return chart + _table(head, body)


def _links(facts: Facts) -> str:
    rows = [
        [
            f"{link['from']} → {link['to']}",
            f"{link['bytes_per_step'] / 1e6:.2f} MB",
            f"{link['bytes'] / 1e6:.1f} MB",
            f"{link['bytes_per_second'] / 1e6:.2f} MB/s" if link["bytes_per_second"] else "-",
            _predicted(link["predicted_busy_seconds"], link["measured_busy_seconds"]),
            f"{link['busy_share']:.0%}",
            _Raw(f'<meter min="0" max="1" value="{min(link["busy_share"], 1):.3f}"></meter>'),
            "; ".join(map(_codec, link["codecs"])),
            f"{link['budget_share']:.0%}",
        ]
        for link in facts["links"]
    ]
    head = [
        "link",
        "a step",
        "in all",
        "while busy",
        "busy a step: predicted, measured",
        "busy",
        "",
        "codecs",
        "of loss budget",
    ]
    note = f'<p class="note">{escape(facts["bottleneck"])}.</p>' if facts.get("bottleneck") else ""
    return _table(head, rows, left=(0, 7)) + note if rows else ""


def _bytes(facts: Facts) -> str:
    classes, steps = facts["bytes"], max(len(facts["losses"]), 1)
    rows = [[name, size(classes[name]), f"{size(classes[name] / steps)} a step"] for name in ("values", "gradients")]
    for what, name in (
        ("weights that no step changes, once, to peers", "base"), ("such weights, from peer to peer", "shared"),
        ("other weights and states, to peers", "state"),
    ):  # fmt: skip
        sent = {peer: nbytes for peer, nbytes in classes[name].items() if nbytes}
        parts = ", ".join(f"{peer} {size(nbytes)}" for peer, nbytes in sent.items())
        rows.append([what, size(sum(sent.values())), parts])
    kept = classes["checkpoints"]
    rows.append([f"{len(kept)} checkpoints", size(sum(kept)), f"the last one {size(kept[-1])}" if kept else ""])
    return _table(["what", "in all", ""], rows, left=(0, 2)) if facts["losses"] else ""


def _codec(use: Mapping[str, Any]) -> str:
    error = f", error {use['error']:.2g}, bias {use['bias']:+.1%}" if use["error"] else ""
    broken = f", {number_of('message', use['not_finite'])} with NaN or infinity" if use["not_finite"] else ""
    return f"{use['codec']} ({use['factor']:.1f} times fewer bytes{error}{broken})"


def _plan(facts: Facts) -> str:
    if not facts["stages"]:
        return ""
    rows = [
        [
            f"{s['stage']}: {s['peer']}", f"{s['ops']} ({s['first_op']} to {s['end_op'] - 1})", s["blocks"],
            str(s["window"]), _predicted(s["predicted_busy_seconds"], s["measured_busy_seconds"]),
            size(s["predicted_memory_bytes"]),
        ]
        for s in facts["stages"]
    ]  # fmt: skip
    head = ["stage: peer", "ops", "from - to", "window", "busy a step: predicted, measured", "memory, predicted"]
    notes = "".join(f"<li>{escape(note)}</li>" for note in facts["plan_notes"])
    step = _predicted(facts["predicted_step_seconds"], facts["median_step_seconds"])
    step_note = (
        f'<p class="note" style="margin-top: 10px">A step: predicted, measured: {step}.</p>'
        if facts["predicted_step_seconds"]
        else ""
    )
    return _table(head, rows, left=(0, 2)) + step_note + (f'<ul class="log">{notes}</ul>' if notes else "")


def _predicted(predicted: float | None, measured: float | None) -> str:
    return ", ".join("-" if not value else duration(value) for value in (predicted, measured))


def _sample(facts: Facts) -> str:
    texts = [f"{row['prompt']}\n{row['text']}" for row in facts["texts"]] + [facts.get("sample") or ""]
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts if text)


def _log(facts: Facts) -> str:
    return f'<ul class="log">{"".join(f"<li>{escape(line)}</li>" for line in facts["log"])}</ul>'


def _files(facts: Facts) -> str:
    rows = [[what, str(facts[what])] for what in ("checkpoint", "plan", "run_dir") if facts.get(what)]
    rows += [[what, str(value)] for what, value in dict(facts.get("machine") or {}).items()]
    rows += [
        [f"peer {p['name']}", f"{p['flops_per_second'] / 1e9:.3g} GFLOP/s measured at duty {p['duty']:.0%}; "
         f"{size(p['memory_used_bytes'])} of {size(p['memory_bytes'])} of memory used at most"]
        for p in facts["peers"]
    ]  # fmt: skip
    return _table(["", ""], rows, left=(0, 1))


class _Raw(str):
    """Markup that goes into a table as it is."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        css = "" if column in left else ' class="r"'
        return f"<{tag}{css}>{text if isinstance(text, _Raw) else escape(text)}</{tag}>"

    top = "".join(cell("th", i, text) for i, text in enumerate(head)) if any(head) else ""
    body = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
