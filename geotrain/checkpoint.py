"""Checkpoints of a run: written whole or not at all, opened, verified, pruned. I/O.

A checkpoint is a folder `checkpoints/step-00000100` with one safetensors file a stage and `manifest.json`.
It is built in a hidden folder and renamed when every byte is on the disk, so that a crash at any moment
leaves the one before whole.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import TensorSpec
from .disk import disk_errors, hash_file, sync_folder, write_atomic
from .errors import CheckpointError, RemoteProtocolError
from .manifest import Manifest, ManifestFile
from .weights import StreamingWriter, WeightStore

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
HF_FOLDER = "hf"
"""Where a run keeps config and tokenizer of the Hugging Face folder it came from."""

BEST = "best.json"
"""Says which checkpoint has the least held-out loss."""

_NAME = re.compile(r"^step-(\d{8,})(\.old)?$")
_HIDDEN = ".partial-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its manifest, and its tensors by name. Close the store when done."""

    path: Path
    manifest: Manifest
    store: WeightStore


class CheckpointWriter:
    """Takes a checkpoint's tensors in chunks, from several stages at once, in O(chunk) memory.

    Each stage's tensors go to a file of their own. Use `write` for every chunk, then `finish`; or `abort`.
    Both block on the disk.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        stages: Mapping[int, Mapping[str, TensorSpec]],
        *,
        run: str,
        step: int,
        seed: int,
        graph_hash: str,
        config_digest: str,
        ties: Mapping[str, str] | None = None,
        transient: tuple[str, ...] = (),
    ) -> None:
        """`stages`: what each stage will send. Raises `LocalError` if the disk cannot hold it."""
        self._root = Path(run_dir) / FOLDER
        self._final = self._root / f"step-{step:08d}"
        self._partial = self._root / f"{_HIDDEN}{step:08d}"
        self._facts: dict[str, Any] = {
            "run": run, "step": step, "seed": seed, "graph_hash": graph_hash, "config_digest": config_digest,
            "ties": dict(ties or {}), "transient": transient,
        }  # fmt: skip
        self._writers: dict[int, StreamingWriter] = {}
        try:
            with disk_errors(self._root, "the checkpoint"):
                self._root.mkdir(parents=True, exist_ok=True)
                for stale in self._root.glob(f"{_HIDDEN}*"):
                    shutil.rmtree(stale)
                self._partial.mkdir()
            for stage, specs in stages.items():
                path = self._partial / f"stage-{stage:03d}.safetensors"
                self._writers[stage] = StreamingWriter(path, specs)
        except BaseException:
            self.abort()
            raise

    def write(self, stage: int, name: str, offset: int, data: Any) -> None:
        """Takes the next chunk of a tensor. Raises `RemoteProtocolError` if it is not that, `LocalError` if
        the disk refuses it."""
        if stage not in self._writers:
            raise RemoteProtocolError(f"stage {stage} has no part in the checkpoint")
        self._writers[stage].write(name, offset, data)

    @property
    def complete(self) -> bool:
        """True when every byte has come."""
        return not any(writer.missing for writer in self._writers.values())

    def finish(self) -> Path:
        """Makes the checkpoint durable and visible; returns its folder. It replaces one of the same step.

        Raises `CheckpointError` if bytes are missing, `LocalError` if the disk refuses; then nothing is left.
        """
        try:
            files = {
                w.path.name: ManifestFile(sha256=w.finish(), nbytes=w.nbytes, tensors=tuple(w.specs))
                for w in self._writers.values()
            }
            manifest = Manifest(files=files, **self._facts)
            write_atomic(self._partial / MANIFEST, manifest.to_json().encode())
            self._show()
        except BaseException:
            self.abort()
            raise
        return self._final

    def _show(self) -> None:
        old = self._final.with_suffix(".old")
        with disk_errors(self._final, "the checkpoint"):
            if self._final.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(self._final, old)  # should we die here, `latest` finds it under this name
            os.rename(self._partial, self._final)
            sync_folder(self._root)
            shutil.rmtree(old, ignore_errors=True)

    def abort(self) -> None:
        """Deletes what was written, unless it is finished."""
        for writer in self._writers.values():
            writer.abort()
        shutil.rmtree(self._partial, ignore_errors=True)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint folder and checks all but the hashes: manifest, files, sizes, tensors.

    Raises `CheckpointError` with what is wrong.
    """
    path = Path(path)
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}") from None
    manifest = Manifest.from_json(text)
    store = WeightStore(path)
    found = {file.path.name: file for file in store.files}
    for name, entry in manifest.files.items():
        file = found.pop(name, None)
        if file is None or file.nbytes != entry.nbytes or set(file.specs) != set(entry.tensors):
            store.close()
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is not the file that was written")
    if found:
        store.close()
        raise CheckpointError(f"checkpoint {path} is damaged: {next(iter(found))} is not in its manifest")
    return Checkpoint(path, manifest, store)


def verify(checkpoint: Checkpoint) -> None:
    """Compares every file with its hash. Raises `CheckpointError` naming the first that differs."""
    for name, entry in checkpoint.manifest.files.items():
        if hash_file(checkpoint.path / name) != entry.sha256:
            raise CheckpointError(f"checkpoint {checkpoint.path} is damaged: the hash of {name} does not match")


def latest(run_dir: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint of a run that is complete, or None; incomplete and broken ones are skipped."""
    for path in _folders(run_dir):
        try:
            return open_checkpoint(path)
        except CheckpointError:
            continue
    return None


def set_best(run_dir: Path, step: int, loss: float) -> None:
    """The checkpoint after `step` steps is the best so far; it is kept however old it gets."""
    write_atomic(run_dir / BEST, json.dumps({"step": step, "held_out_loss": loss}).encode())


def best_so_far(run_dir: Path) -> tuple[int, float] | None:
    """What `set_best` was told last: the step and its held-out loss."""
    try:
        record: Any = json.loads((run_dir / BEST).read_bytes())
        return int(record["step"]), float(record["held_out_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def best(run_dir: Path) -> Checkpoint | None:
    """The best checkpoint, if it is complete."""
    found = best_so_far(run_dir)
    try:
        return None if found is None else open_checkpoint(run_dir / FOLDER / f"step-{found[0]:08d}")
    except CheckpointError:
        return None


def prune(run_dir: str | os.PathLike[str], keep: int) -> None:
    """Deletes all but the `keep` (at least 1) newest complete checkpoints and the best, and older broken ones."""
    kept = 0
    found = best_so_far(Path(run_dir))
    best_name = None if found is None else f"step-{found[0]:08d}"
    for path in _folders(run_dir):
        if kept >= max(keep, 1):
            if path.name == best_name:
                continue
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            open_checkpoint(path).store.close()
        except CheckpointError:
            continue
        kept += 1


def _folders(run_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """Checkpoint folders, the newest step first; of one step, the replaced one (`.old`) last."""
    root = Path(run_dir) / FOLDER
    matches = [m for m in map(_NAME.match, os.listdir(root) if root.is_dir() else []) if m]
    for match in sorted(matches, key=lambda m: (-int(m[1]), m[2] is not None)):
        yield root / match[0]
