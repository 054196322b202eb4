"""`geotrain status`: how a run goes and what network it measured, from the record in its folder, also while it runs.
I/O."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from .base import Link, LinkUse, Peer
from .disk import write_atomic
from .errors import UserError
from .links import LinkBook
from .runfolder import EVENTS
from .topology import to_toml
from .words import duration

_RECENT = 10
"""So many steps say how long one takes."""

_SAID = 3
"""So many of the last decisions are shown."""

_Record = TypeVar("_Record", Peer, Link)


@dataclass
class Record:
    """What the events of a run tell. `peers` and `links` as last measured; `plan` is the last Planned event as JSON;
    `said` what was last decided; `seconds` of the steps."""

    peers: dict[str, Peer] = field(default_factory=dict[str, Peer])
    links: list[Link] = field(default_factory=list[Link])
    plan: dict[str, Any] | None = None
    step: int = 0
    steps: int = 0
    loss: float | None = None
    held_out: tuple[int, float] | None = None
    tokens: int = 0
    seconds: list[float] = field(default_factory=list[float])
    said: list[str] = field(default_factory=list[str])
    ended: str = ""

    @property
    def step_s(self) -> float | None:
        return median(self.seconds[-_RECENT:]) if self.seconds else None


def read(run: Path) -> Record:
    """Raises `UserError` if the folder holds no record of a run."""
    path = run / EVENTS
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    except OSError as error:
        raise UserError(f"{run}: no record of a run: {error.strerror}; give the folder that a run printed") from None
    except ValueError as error:
        raise UserError(f"{path}: this is no record of a run: {error}; give the folder that a run printed") from None
    record, book, now = Record(), LinkBook(), 0.0
    links: dict[tuple[str, str], Link] = {}
    for row in rows:
        match row["event"]:
            case "PeerJoined":
                record.peers[row["name"]] = Peer(row["name"], row["flops_per_s"], row["memory_bytes"])
                record.ended = ""
            case "PeerGone":
                record.peers.pop(row["name"], None)
                record.said.append(f"{row['name']} is gone: {row['reason']}")
            case "Planned":
                record.plan = row
                record.peers |= {peer["name"]: _limitless(Peer, peer) for peer in row["peers"]}
                links |= {(link["src"], link["dst"]): _limitless(Link, link) for link in row["links"]}
                record.said += [f"another plan: {row['reason']}"] if row["reason"] else []
            case "Considered":
                record.said.append(f"step {row['step']}: {row['reason']}")
            case "StepCommitted":
                uses = [LinkUse(**use) for stage in row["stages"] for use in stage["links"]]
                book.saw(uses, now, now + row["seconds"])
                now += row["seconds"]
                record.seconds.append(row["seconds"])
                record.step, record.steps, record.loss = row["step"], row["steps"], row["loss"]
                record.tokens = row["tokens"]
            case "Evaluated":
                record.held_out = row["step"], row["loss"]
            case "Ended":
                record.ended = row["reason"]
            case _:
                pass
    up, down = book.caps()
    for name, peer in record.peers.items():
        record.peers[name] = replace(
            peer, up_bytes_per_s=up.get(name, peer.up_bytes_per_s),
            down_bytes_per_s=down.get(name, peer.down_bytes_per_s),
        )  # fmt: skip
    links |= {(link.src, link.dst): link for link in book.links(list(record.peers), now)}
    record.links = [link for link in links.values() if link.src in record.peers and link.dst in record.peers]
    return record


def _limitless(kind: type[_Record], fields: Mapping[str, Any]) -> _Record:
    """From JSON, where infinity is null."""
    values: dict[str, Any] = {name: math.inf if value is None else value for name, value in fields.items()}
    return kind(**values)


def main(run: Path, topology: Path | None) -> None:
    """Prints how the run goes; with `topology` writes its network there, too. Raises `UserError`."""
    record, console = read(run), Console(highlight=False)
    if topology is not None and not record.peers:
        raise UserError(f"{run}: no peer has been measured yet; try again when some have joined")
    show(console, record)
    if topology is not None:
        write_atomic(topology, to_toml(list(record.peers.values()), record.links).encode())
        console.print(f"the network is in {topology}")


def show(console: Console, record: Record) -> None:
    where = f"step {record.step} of {record.steps}" if record.steps else "no step yet"
    words = [where if not record.ended else f"ended: {record.ended}, at {where}"]
    if record.loss is not None and record.step_s:
        words += [f"loss {record.loss:.4f}", f"{duration(record.step_s)} a step"]
        words += [f"{record.tokens / record.step_s:,.0f} tokens/s"] if record.tokens else []
    if record.held_out is not None:
        words.append(f"held-out loss {record.held_out[1]:.4f} after {record.held_out[0]} steps")
    console.print(", ".join(words))
    if record.plan is not None:
        console.print(_stages(record.plan))
        predicted = f"a step: {duration(record.plan['predicted_s'])}, predicted"
        measured = f"; {duration(record.step_s)}, measured" if record.step_s else ""
        console.print(f"{predicted}{measured}; bottleneck: {record.plan['bottleneck']}")
        benched = record.plan["plan"]["benched"]
        if benched:
            console.print(f"without a stage: {', '.join(benched)}")
    if record.links:
        table = Table("link", "Mbit/s", "delay", box=None, pad_edge=False)
        for link in sorted(record.links, key=lambda link: link.rate_bytes_per_s):
            table.add_row(f"{link.src} to {link.dst}", f"{link.rate_bytes_per_s * 8e-6:.3g}", duration(link.latency_s))
        console.print(table)
    for line in record.said[-_SAID:]:
        console.print(line)


def _stages(planned: Mapping[str, Any]) -> Table:
    table = Table("stage", "peer", "what", "sends values as", "gradients as", box=None, pad_edge=False)
    for i, (stage, blocks) in enumerate(zip(planned["plan"]["stages"], planned["stage_blocks"], strict=True)):
        table.add_row(str(i), stage["peer"], blocks, stage["codec_forward"], stage["codec_backward"])
    return table
