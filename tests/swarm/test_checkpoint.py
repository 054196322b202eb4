"""A checkpoint is there whole or not at all: through kill -9, a full disk, damage and bad senders."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geotrain.base import TensorSpec
from geotrain.checkpoint import CheckpointWriter, latest, open_checkpoint, prune, verify
from geotrain.errors import CheckpointError, LocalError, RemoteProtocolError

FACTS = {"run": "r", "seed": 1, "graph_hash": "g", "config_digest": "c"}
STAGES = {
    0: {"a": TensorSpec((3, 5), "float32"), "optimizer/exp_avg/a": TensorSpec((3, 5), "float32")},
    1: {
        "b": TensorSpec((7,), "bfloat16"),
        "mask": TensorSpec((), "bool"),
        "empty": TensorSpec((0,), "int64"),
    },
}


def fill(writer: CheckpointWriter, stages: dict[int, dict[str, TensorSpec]], value: int) -> None:
    """Sends every tensor in two chunks, the stages taking turns."""
    for part in (0, 1):
        for stage, specs in stages.items():
            for name, spec in specs.items():
                half = spec.nbytes // 2
                start, end = ((0, half), (half, spec.nbytes))[part]
                writer.write(stage, name, start, bytes([value % 256]) * (end - start))


def write(run_dir: Path, step: int, value: int = 1, **more: object) -> Path:
    writer = CheckpointWriter(run_dir, STAGES, step=step, **FACTS, **more)
    fill(writer, STAGES, value)
    assert writer.complete
    return writer.finish()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    path = write(tmp_path, 100, 1, ties={"head": "b"}, transient=("mask",))
    assert path == tmp_path / "checkpoints" / "step-00000100"
    checkpoint = latest(tmp_path)
    assert checkpoint is not None and checkpoint.path == path
    verify(checkpoint)
    with checkpoint.store as store:
        assert checkpoint.manifest.step == 100 and checkpoint.manifest.ties == {"head": "b"}
        assert {n: store.spec(n) for n in store.names()} == STAGES[0] | STAGES[1]
        assert store.read("a") == b"\1" * 60
        assert store.load("mask").item() is True
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000100"]


def test_incomplete_ones_are_passed_over(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    broken = [write(tmp_path, step) for step in (2, 3, 4, 5)]
    (broken[0] / "manifest.json").unlink()
    (broken[1] / "stage-000.safetensors").unlink()
    os.truncate(broken[2] / "stage-001.safetensors", 50)
    (broken[3] / "manifest.json").write_text("{}")
    for path in broken:
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    found = latest(tmp_path)
    assert found is not None and found.path == good
    found.store.close()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    with open(path / "stage-001.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\7")
    with (
        open_checkpoint(path).store,
        pytest.raises(CheckpointError, match=r"stage-001.*hash|hash.*stage-001"),
    ):
        verify(open_checkpoint(path))


def test_bad_senders_and_missing_bytes(tmp_path: Path) -> None:
    previous = write(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, STAGES, step=2, **FACTS)
    for stage, name, offset, data in (
        (2, "a", 0, b""),
        (1, "a", 0, b"1"),
        (0, "a", 4, b"1"),
        (0, "a", 0, b"1" * 61),
    ):
        with pytest.raises(RemoteProtocolError):
            writer.write(stage, name, offset, data)
    assert not writer.complete
    with pytest.raises(CheckpointError, match="lacks bytes"):
        writer.finish()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [previous.name]


def test_the_same_step_again_replaces_and_old_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        write(tmp_path, step, value=step)
    write(tmp_path, 3, value=9)
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    with checkpoint.store as store:
        assert store.read("a") == b"\t" * 60
    # A crash between the two renames leaves the replaced one under its other name.
    os.rename(checkpoint.path, checkpoint.path.with_suffix(".old"))
    found = latest(tmp_path)
    assert found is not None and found.manifest.step == 3
    found.store.close()
    prune(tmp_path, 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000002", "step-00000003.old"]
    prune(tmp_path, 0)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000003.old"]


@pytest.mark.parametrize("after", range(12))
def test_a_crash_at_any_step_of_finishing_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stops the world at the n-th durable action, as a crash would: nothing is cleaned up."""
    write(tmp_path, 1, 1)
    write(tmp_path, 2, 2)

    class Crash(BaseException):
        pass

    count = 0

    def crashing(original):
        def call(*args, **kwargs):
            nonlocal count
            if count == after:
                raise Crash
            count += 1
            return original(*args, **kwargs)

        return call

    writer = CheckpointWriter(tmp_path, STAGES, step=2, **FACTS)
    fill(writer, STAGES, 3)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "abort", lambda self: None)
        for name in ("fsync", "rename", "replace"):
            patch.setattr(os, name, crashing(getattr(os, name)))
        with contextlib.suppress(Crash):
            writer.finish()
    checkpoint = latest(tmp_path)
    assert checkpoint is not None and checkpoint.manifest.step == 2
    verify(checkpoint)
    with checkpoint.store as store:
        assert store.read("a") in (b"\2" * 60, b"\3" * 60)
    write(tmp_path, 3, 3)  # the next one sweeps up
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


LOOP = """
import itertools, sys
from geotrain.base import TensorSpec
from geotrain.checkpoint import CheckpointWriter, latest, prune
run_dir, size = sys.argv[1], 300_000
stages = {s: {f"w{s}.{i}": TensorSpec((size,), "uint8") for i in range(4)} for s in (0, 1)}
found = latest(run_dir)
for step in itertools.count(found.manifest.step + 1 if found else 0):
    writer = CheckpointWriter(run_dir, stages, run="r", step=step, seed=0, graph_hash="g", config_digest="c")
    for stage, specs in stages.items():
        for name in specs:
            for offset in range(0, size, 100_000):
                writer.write(stage, name, offset, bytes([step % 256]) * 100_000)
    writer.finish()
    prune(run_dir, 2)
    print(step, flush=True)
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    reported = -1
    for round_ in range(4):
        child = subprocess.Popen([sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            reported = int(child.stdout.readline())
            time.sleep(random.Random(round_).uniform(0, 0.15))
        finally:
            os.kill(child.pid, signal.SIGKILL)
            rest, _ = child.communicate()
        reported = int(rest.split()[-1]) if rest.split() else reported
        checkpoint = latest(tmp_path)
        assert checkpoint is not None and checkpoint.manifest.step >= reported
        verify(checkpoint)
        with checkpoint.store as store:
            assert all(set(store.read(name)) == {checkpoint.manifest.step % 256} for name in store.names())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root and mount to make a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_costs_nothing(small_disk: Path) -> None:
    previous = write(small_disk, 1)
    large = {0: {"a": TensorSpec((3 << 20,), "uint8")}, 1: {"b": TensorSpec((3 << 20,), "uint8")}}
    with pytest.raises(LocalError, match="no space left") as caught:
        CheckpointWriter(small_disk, large, step=2, **FACTS)
    assert "\n" not in str(caught.value)
    found = latest(small_disk)
    assert found is not None and found.path == previous
    verify(found)
    found.store.close()
    assert os.listdir(small_disk / "checkpoints") == [previous.name]
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(LocalError, match="no space left"):
        write(small_disk, 2)
    found = latest(small_disk)
    assert found is not None and found.path == previous
    found.store.close()
