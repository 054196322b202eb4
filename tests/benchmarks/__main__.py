"""All benchmarks, or one: tables on the terminal, the same as JSON.

    python -m tests.benchmarks [--only NAME ...] [--short] [--json FILE] [--keep]

The short form takes a minute for each at most and shows that it works; it fails where a ratio is more than the one in
`kept.json` and still is when the benchmark has run a second time. `--keep` writes that file: three times what was
measured now.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .tables import Table, Unavailable, machine

BENCHMARKS = {
    "simulator": "its speed, and its steps against those of real processes",
    "drift": "re-planning on networks that drift, against a planner that knows everything",
    "replan": "changes of the network and of peers while a real run goes on",
    "overhead": "what splitting costs on loopback",
    "transport": "frames over our transport against a bare gRPC stream",
    "startup": "from a command to the first step, from join to the first microbatch",
    "torch-pipelining": "against torch.distributed.pipelining, on links shaped by the kernel",
    "hivemind-optimizer": "against hivemind's data-parallel optimizer, on links shaped by the kernel",
    "codecs": "bytes, error and speed of every codec",
    "big-model": "memory of each process with a model of a billion parameters",
    "memory": "what the planner expects of a stage against the peak of a real peer",
    "quality": "held-out loss against bytes on the links, from scratch, of a dozen pairs of codecs",
    "adaptive": "codecs as a run chooses them in homes, against links without limit and AdaTopK",
    "outer-sync": "held-out loss against bits for each parameter, of replicas",
    "finetuning": "the same with pretrained weights, LoRA and all of them",
    "planner": "plans against exhaustive search and their proven lower bounds",
    "planning": "plans against simpler ones, by the planner's model",
    "planning-real": "plans against simpler ones, on real peers",
    "replicas": "several pipelines in the world of DT-FM",
}
"""Modules of this folder (with underscores) that have `benchmark(short: bool) -> list[Table]`, and what they tell."""

KEPT = Path(__file__).with_name("kept.json")
_ROOM = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), metavar="NAME",
                        help=", ".join(f"{name} ({what})" for name, what in BENCHMARKS.items()))  # fmt: skip
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", action="store_true", help="let the short form's ratios be the ones to keep")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 160)
    facts: dict[str, Any] = {"machine": machine(), "short": options.short, "benchmarks": {}}
    console.print(", ".join(f"{name} {value}" for name, value in facts["machine"].items()), highlight=False)
    kept: dict[str, float] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    compared = kept if options.short and not options.keep else {}
    failed = False
    for name in options.only:
        start = time.monotonic()
        try:
            tables = _run(name, options.short, console)
            if _over(name, tables, compared, console):
                console.print(f"{name}: once more, since something else may have kept the machine busy")
                tables = _run(name, options.short, console)
                failed |= _over(name, tables, compared, console)
        except Unavailable as error:
            console.print(f"{name}: {error}", style="red")
            failed = True
            continue
        facts["benchmarks"][name] = {
            "seconds": round(time.monotonic() - start, 1), "tables": [table.facts() for table in tables],
        }  # fmt: skip
        if options.json:  # after each, so that a long one that fails costs nothing but itself
            options.json.write_text(json.dumps(facts, indent=2))
        if options.keep and options.short:
            kept |= {what: round(value * _ROOM, 3) for what, value in _ratios(name, tables).items()}
            KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=2) + "\n")
    return int(failed)


def _run(name: str, short: bool, console: Console) -> list[Table]:
    tables: list[Table] = importlib.import_module(f".{name.replace('-', '_')}", __package__).benchmark(short)
    for table in tables:
        table.print(console)
    return tables


def _ratios(name: str, tables: Sequence[Table]) -> dict[str, float]:
    return {f"{name}: {what}": value for table in tables for what, value in table.ratios.items()}


def _over(name: str, tables: Sequence[Table], kept: Mapping[str, float], console: Console) -> bool:
    """Whether a ratio is over the kept one."""
    over = {what: value for what, value in _ratios(name, tables).items() if value > kept.get(what, value)}
    for what, value in over.items():
        console.print(f"{what} is {value:.3g}, over the kept {kept[what]:.3g}", style="red")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
