"""The folder of a run: job.json, graph.msgpack, plan.json, ledger.sqlite, events.jsonl, checkpoints/. I/O."""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from . import events
from .base import Plan
from .checkpoint import Checkpoint, latest
from .config import JobConfig, dump_job
from .disk import disk_errors, write_atomic
from .errors import CheckpointError, UserError
from .graph import OpGraph, graph_hash, to_bytes
from .ledger import Ledger
from .words import number_of

JOB, GRAPH, PLAN, LEDGER, EVENTS = "job.json", "graph.msgpack", "plan.json", "ledger.sqlite", "events.jsonl"


class RunFolder:
    """An open run folder. With `resume` it holds a run already, whose newest checkpoint is `checkpoint`."""

    def __init__(self, path: Path, job: JobConfig, graph: OpGraph, *, resume: bool) -> None:
        """Raises `UserError` if there is a run and none should be, or none and one should; `CheckpointError`
        if it is of another model or job; `LocalError` if the disk refuses."""
        self.path = path
        self.graph_hash = graph_hash(graph)
        self.config_digest = config_digest(job)
        self.checkpoint: Checkpoint | None = None
        if resume and not (path / LEDGER).is_file():
            raise UserError(f"{path} holds no run to resume; give the folder that a run printed")
        if not resume:
            refuse_used(path, job.run.name)
        with disk_errors(path, "the run folder"):
            path.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(path / LEDGER, job.run.name)
        try:
            if resume:
                self._open_checkpoint()
            write_atomic(path / JOB, dump_job(job).encode())
            write_atomic(path / GRAPH, to_bytes(graph))
            with disk_errors(path / EVENTS, EVENTS):
                self._log = open(path / EVENTS, "a", encoding="utf-8")
        except BaseException:
            self.ledger.close()
            raise

    def _open_checkpoint(self) -> None:
        checkpoint = latest(self.path)
        if checkpoint is None:
            return
        manifest = checkpoint.manifest
        for what, ours, theirs in [
            ("model", self.graph_hash, manifest.graph_hash),
            ("job", self.config_digest, manifest.config_digest),
        ]:
            if ours != theirs:
                checkpoint.store.close()
                raise CheckpointError(
                    f"{checkpoint.path} is of another {what}; resume it with the {JOB} of its run folder"
                )
        if manifest.step > self.ledger.steps:
            checkpoint.store.close()
            raise CheckpointError(f"the ledger of {self.path} is older than its checkpoint; restore the ledger")
        self.checkpoint = checkpoint

    def write_plan(self, plan: Plan) -> None:
        write_atomic(self.path / PLAN, plan.to_json().encode())

    def log(self, event: events.RunEvent) -> None:
        """Append an event as one line of JSON. Heartbeats are of the moment and are left out."""
        if not isinstance(event, events.PeerProgress):
            record = {"event": type(event).__name__, **_jsonable(event)}
            with disk_errors(self.path / EVENTS, EVENTS):
                self._log.write(json.dumps(record) + "\n")
                self._log.flush()

    def close(self) -> None:
        self._log.close()
        self.ledger.close()


def refuse_used(path: Path, name: str) -> None:
    """Raises `UserError` if the folder holds steps of the run: before anything is written there, ask."""
    if (path / LEDGER).is_file():
        with contextlib.closing(Ledger(path / LEDGER, name)) as ledger:
            steps = ledger.steps
        if steps:
            raise UserError(f"{path} holds a run of {number_of('step', steps)}; resume it, or choose another run name")


def config_digest(job: JobConfig) -> str:
    """What must be equal to resume a run bit for bit: model, data, training and seed, but not how long."""
    sections = job.model_dump(mode="json", include={"model", "data", "train"})
    sections["train"].pop("steps")
    sections["seed"] = job.run.seed
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    """Records as maps; JSON has no NaN or infinity, so these become None."""
    if is_dataclass(value):
        return {field.name: _jsonable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
