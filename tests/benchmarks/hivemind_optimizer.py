"""geotrain beside hivemind's optimizer, which is data parallel: every peer holds the whole model. I/O (root).

Both train the same model with the same steps of 32 samples on the same shaped links, hivemind with and without delayed
updates, for so many seconds. geotrain runs as its users run it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import netswarm
from tests.wan import Wan

from .netbench import geotrain_run, need_networks
from .tables import Cell, Table
from .worlds import PEERS, WORLDS, World, first_weights, plain_loop

SAMPLES = 32
_END_S = 300.0


def benchmark(short: bool) -> list[Table]:
    need_networks()
    if short:
        return [compare("e", 10, 6, delays=(False,))]
    return [compare(name, 120, 40) for name in ("b", "c", "d")]


def compare(name: str, seconds: float, steps: int, delays: tuple[bool, ...] = (False, True)) -> Table:
    """`seconds` of hivemind with each of `delays`, `steps` of geotrain."""
    world = WORLDS[name]
    job = world.config(10_000)
    rows: list[tuple[Cell, ...]] = []
    with tempfile.TemporaryDirectory() as temporary, Wan(world.homes, delay_ms=world.delay_ms) as wan:
        folder = Path(temporary)
        first_weights(job, folder / "weights")
        for delayed in delays:
            lines, sent = hivemind_run(wan, world, folder / "weights", delayed, seconds)
            done = sum(peer[-2]["samples"] for peer in lines) / SAMPLES
            held_out = statistics.fmean(peer[-1]["held_out"] for peer in lines)
            what = f"hivemind, delayed updates {'on' if delayed else 'off'}"
            rows.append((what, seconds / done, done, lines[0][-1]["epoch"], sent / done / 1e6, held_out))
        run = geotrain_run(wan, world, folder / "run", steps=steps, warmup=4, evaluate_every=steps, stages=False)
        rows.append(("geotrain", run.seconds, steps, steps, run.sent_bytes / 1e6, run.held_out[steps][1]))
        marks = sorted({max(1, round(float(row[2] or 0))) for row in rows})
        _, plain, _ = plain_loop(job, folder / "weights", marks[-1], marks)
    table = [(*row, plain[max(1, round(float(row[2] or 0)))]) for row in rows]
    columns = (
        "run", "s for 32 samples", "times 32 samples", "updates", "MB for 32 samples", "held-out loss",
        "of the plain loop after as many samples",
    )  # fmt: skip
    best = min(float(row[1] or 0) for row in rows[:-1])
    return Table(
        f"{name}: {world.title}", columns, table,
        [f"geotrain is {best / run.seconds:.2f} times as fast as the faster of hivemind's; {run.note}"],
        {f"step over hivemind's, {world.title}": run.seconds / best},
    )  # fmt: skip


def hivemind_run(
    wan: Wan, world: World, weights: Path, delayed: bool, seconds: float
) -> tuple[list[list[dict[str, Any]]], int]:
    """What each peer printed, and the bytes that all interfaces sent."""
    spec: dict[str, Any] = {
        "job": world.config(10_000).model_dump(mode="json"), "weights": str(weights), "peers": len(PEERS),
        "first": [], "delayed": delayed, "seconds": seconds,
    }  # fmt: skip
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(len(PEERS)):
                words = [sys.executable, "-m", "tests.benchmarks.hivemind_worker", rank]
                words.append(json.dumps({**spec, "ip": wan.ip(rank)}))
                with Path(folder, f"{rank}.out").open("w") as output, Path(folder, f"{rank}.err").open("w") as errors:
                    processes.append(
                        wan.popen(rank, words, stdin=subprocess.PIPE, stdout=output, stderr=errors,
                                  text=True, env=netswarm.environment())
                    )  # fmt: skip
                spec["first"] = spec["first"] or [_wait_for(Path(folder, f"{rank}.out"), 1, processes)[0]]
            for rank in range(len(PEERS)):
                _wait_for(Path(folder, f"{rank}.out"), 2, processes)
            before = sum(wan.bytes()[0])
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            time.sleep(seconds)
            sent = sum(wan.bytes()[0]) - before
            lines: list[list[dict[str, Any]]] = []
            for rank in range(len(PEERS)):
                end = time.monotonic() + _END_S
                while "held_out" not in (text := Path(folder, f"{rank}.out").read_text()):
                    if time.monotonic() > end:
                        raise RuntimeError(f"hivemind's peer {rank} does not end")
                    time.sleep(0.2)
                lines.append([json.loads(line) for line in text.splitlines()[2:] if line.startswith("{")])
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    return lines, sent


def _wait_for(path: Path, count: int, processes: list["subprocess.Popen[str]"]) -> list[str]:
    """So many lines of a file."""
    end = time.monotonic() + _END_S
    while len(lines := path.read_text().splitlines()) < count:
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            said = "; ".join(error.read_text()[-300:] for error in sorted(path.parent.glob("*.err")))
            raise RuntimeError(f"hivemind's peers did not start: {said}")
        time.sleep(0.1)
    return lines
