"""How long it takes from a command to training, on loopback, as users start it. I/O.

From `geotrain coordinator` to the first step, peers started when the ticket is printed; and from `geotrain join` to the
first microbatch, in peers that have imported everything before they get the ticket.
"""

import statistics
import tempfile
from pathlib import Path

from tests import netswarm

from .tables import Table, alternate
from .worlds import PEERS, WORLDS

MOMENTS = {
    "Ticket": "the ticket is there", "PeerJoined": "all peers have joined", "Planned": "the plan is made",
    "Prepared": "stages have their weights: the first microbatch starts", "StepCommitted": "the first step is done",
}  # fmt: skip


def moments(join: str) -> dict[str, float]:
    """Seconds from the command until each of `MOMENTS`."""
    job = WORLDS["a"].job(3)
    with tempfile.TemporaryDirectory() as folder:
        seen = netswarm.run(None, job, Path(folder), peers=PEERS, until=netswarm.committed(1), join=join)
    return {s.event["event"]: s.at_s for s in seen if s.event["event"] in MOMENTS}


def benchmark(short: bool) -> list[Table]:
    ways = {"pasted": lambda: moments("pasted"), "imported": lambda: moments("imported")}
    turns = alternate(1 if short else 5, ways)
    rows = []
    for name, what in MOMENTS.items():
        pasted = [run[name] for run in turns["pasted"]]
        after = [run[name] - run["Ticket"] for run in turns["imported"]]
        rows.append((what, statistics.median(pasted), max(pasted), statistics.median(after), max(after)))
    columns = ("until", "s from the coordinator's command", "most", "s from join, after import", "most ")
    title = f"start-up: {len(PEERS)} peers on loopback, GPT of 8 blocks, medians of {len(turns['pasted'])}"
    return [Table(title, columns, rows)]
