"""The demo as a user runs it: it learns, it reports everything, and it leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FACTS = (
    "held_out_loss_before held_out_loss_after losses step_seconds tokens_per_second peers stages links "
    "seconds_by_activity checkpoint plan report"
).split()


def demo(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "geotrain", "demo", *words]


def children(pid: int) -> set[int]:
    """All living descendants of a process, by its own and its children's ids."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found, queue = set(), [pid]
    while queue:
        mine = [child for child, parent in parents.items() if parent == queue[0]]
        found.update(mine)
        queue = queue[1:] + mine
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_demo_learns_and_tells_all(tmp_path):
    facts_path = tmp_path / "facts.json"
    done = subprocess.run(
        demo(tmp_path, "--steps", "16", "--json", str(facts_path)),
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(facts_path.read_text())
    assert [name for name in FACTS if name not in facts] == []
    assert facts["held_out_loss_after"] < 0.75 * facts["held_out_loss_before"]
    assert len(facts["losses"]) == len(facts["step_seconds"]) == 16
    assert len(facts["peers"]) == len(facts["stages"]) == 4
    assert {peer["stage"] for peer in facts["peers"]} == {0, 1, 2, 3}
    assert all(link["bytes"] > 0 for link in facts["links"])
    for name in ("checkpoint", "plan", "report"):
        assert (tmp_path / facts[name]).exists(), name
    report = (tmp_path / facts["report"]).read_text()
    assert report.count("<svg") >= 3
    assert "http://" not in report.replace("http://www.w3.org", "") and "https://" not in report
    assert "held-out loss" in done.stdout


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds child processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(tmp_path, how):
    process = subprocess.Popen(
        demo(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("step "):
                break
        started = children(process.pid)
        assert len(started) >= 4
        os.kill(process.pid, how)
        deadline = time.monotonic() + 30  # 10 on a quiet machine
        while any(alive(pid) for pid in started) or process.poll() is None:
            assert time.monotonic() < deadline, "a process is left 30 s after the end"
            time.sleep(0.1)
        assert process.wait() != 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
