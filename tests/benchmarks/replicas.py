"""Several pipelines over ten regions of the world, against a scheduler made as DT-FM's is described (`dtfm`)."""

import statistics
import time

from geotrain.planner.exchange import Exchange
from geotrain.planner.replicas import priced, replicas

from . import dtfm
from .tables import Table


def benchmark(short: bool) -> list[Table]:
    worlds, offspring = (1, 50) if short else (3, 1000)
    rows: list[tuple[str, int, float, float, float, float | None, str, float]] = []
    for speeds in (1.0, 20.0):
        theirs: dict[int, list[float]] = {1: [], 50: []}
        ours: dict[int, list[float]] = {1: [], 50: []}
        seconds: list[float] = []
        shapes: list[str] = []
        for seed in range(worlds):
            problem, sync_bytes = dtfm.world(seed, speeds)
            ways = dtfm.Scheduler(problem, offspring=offspring).plan(seed)
            for every in theirs:
                theirs[every].append(
                    priced(problem, sync_bytes, every, ways, Exchange(problem, grouped=False)).step_seconds
                )
                start = time.process_time()
                plan = replicas(problem, sync_bytes, every, seed=seed)
                seconds.append(time.process_time() - start)
                assert plan is not None
                ours[every].append(plan.step_seconds)
                shapes.append(f"{len(plan.pipelines)} of {len(plan.pipelines[0].order)}")
        for i, every in enumerate(theirs):
            ratio = statistics.median(a / b for a, b in zip(ours[every], theirs[every], strict=True))
            rows.append(
                ("equal" if speeds == 1 else f"1 to {speeds:g} times", every, statistics.median(theirs[every]),
                 statistics.median(ours[every]), ratio, dtfm.CITED[every] if speeds == 1 else None, shapes[i],
                 statistics.median(seconds))
            )  # fmt: skip
    columns = ("speeds", "steps between syncs", "DT-FM-like, s", "ours, s", "ours / theirs", "DT-FM cited, s",
               "pipelines of stages", "CPU seconds to plan")  # fmt: skip
    notes = [
        f"64 peers in 10 regions drawn at random, {worlds} worlds, medians; {offspring} offspring (theirs: 4,900). "
        f"{dtfm.LAYERS} layers of "
        f"{dtfm.LAYER_SECONDS} s a sample on the slowest peer, {dtfm.ACTIVATION_BYTES / 1e6:.1f} MB over a border, "
        f"{dtfm.LAYER_GRADIENT_BYTES / 1e9:.2f} GB of gradients a layer, {dtfm.MICROBATCHES * dtfm.REPLICAS} samples a "
        "step; nothing is compressed. Both plans are costed by our model.",
        "Cited: the plan of DT-FM's released code in an earlier model of ours; its compute may differ from this one's.",
    ]
    ratios = {f"ours over DT-FM-like, {row[0]}, sync every {row[1]}": row[4] for row in rows}
    return [Table("Replicas in the world of DT-FM", columns, rows, notes, ratios)]
