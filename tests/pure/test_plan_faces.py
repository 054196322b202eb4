"""`geotrain plan`: what it prints, writes and refuses; models from a line, networks from a file or a run."""

import json
from functools import cache
from itertools import pairwise
from xml.dom import minidom

import pytest

from geotrain import cli, events, planning, status, topology
from geotrain.base import Link, LinkUse, Peer, StageReport
from geotrain.config import JobConfig, TrainConfig
from geotrain.coordinate import read_plan
from geotrain.errors import GeotrainError, PlanError
from geotrain.runfolder import RunFolder
from geotrain.specs import open_spec

MODEL = "transformer:blocks=4,hidden=64,seq=64,vocab=200,microbatches=4"
TOPOLOGY = """
[[peer]]
name = "attic"
region = "vienna"
flops = 2e9
memory_gib = 4
up_mbit_per_s = 50
down_mbit_per_s = 100
[[peer]]
name = "shed"
flops = 1e9
memory_gib = 4
up_mbit_per_s = 40
down_mbit_per_s = 100
[[peer]]
name = "phone"
flops = 1e6
memory_gib = 1
up_mbit_per_s = 1
down_mbit_per_s = 1
[[link]]
src = "attic"
dst = "shed"
latency_ms = 10
"""
KEYS = {"step_seconds", "period_seconds", "stages", "benched", "planning_seconds", "lower_bound_seconds"}
STAGE_KEYS = {
    "peer", "first_op", "last_op", "block_range", "codec_forward", "codec_backward", "window", "compute_seconds",
    "memory_bytes",
}  # fmt: skip


_open_once = cache(open_spec)


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with a topology; gives what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "open_spec", _open_once)
    (tmp_path / "net.toml").write_text(TOPOLOGY)
    (tmp_path / "other.json").write_text('{"stages": [], "what": 1}')

    def run(*words: object, network: bool = True) -> str:
        given = ["plan", *map(str, words), *(["--topology", "net.toml"] if network else [])]
        cli.app(given, standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_json_of_a_model_in_a_line(plan):
    facts = json.loads(plan("--graph", MODEL, "--json"))
    assert facts.keys() == KEYS
    assert all(stage.keys() == STAGE_KEYS for stage in facts["stages"])
    stages = facts["stages"]
    assert stages[0]["first_op"] == 0
    assert all(b["first_op"] == a["last_op"] + 1 for a, b in pairwise(stages))
    assert stages[0]["block_range"][0] == 0 and stages[-1]["block_range"][1] == 3
    assert facts["benched"] == ["phone"]
    assert 0 < facts["lower_bound_seconds"] <= facts["step_seconds"] * (1 + 1e-9)
    assert 0 < facts["period_seconds"] < facts["step_seconds"]


def test_a_table_a_drawing_and_the_simpler_plans(plan, tmp_path):
    text = plan("--graph", MODEL, "--out", "p.json", "--svg", "step.svg")
    for words in ("attic", "shed", "█", "▒", "a step:", "bottleneck:", "DT-FM-like", "phone"):
        assert words in text
    assert minidom.parse(str(tmp_path / "step.svg")).documentElement.tagName == "svg"
    checked = plan("--graph", MODEL, "--check", "p.json")
    assert "p.json is a plan that these peers can run" in checked
    broken = json.loads((tmp_path / "p.json").read_text())
    broken["stages"][0]["peer"] = "garage"
    (tmp_path / "p.json").write_text(json.dumps(broken))
    with pytest.raises(PlanError, match="garage"):
        plan("--graph", MODEL, "--check", "p.json")


def test_several_pipelines_are_priced(plan):
    """Fast peers that need no neighbour: each holds all of the model."""
    said = plan("--graph", MODEL, "--sync-every", "500")
    assert "with an exchange every 500 steps" in said and "2 pipelines" in said
    assert sum(int(line.split()[0]) for line in said.splitlines() if " microbatches: " in line) == 4
    often = plan("--graph", MODEL, "--sync-every", "1")
    assert "1 pipeline would" in " ".join(often.split())


def test_what_if(plan):
    text = plan("--graph", MODEL, "--what-if", "peer attic speed x4", "--what-if", "remove shed")
    assert "if peer attic speed x4; remove shed" in text
    assert "shorter" in text or "longer" in text
    assert "shed has none any more" in text


def test_a_job_writes_plan_json(plan, tmp_path):
    (tmp_path / "job.toml").write_text("[model]\nlayers = 2\nhidden = 32\nheads = 2\ncontext = 32\n")
    assert "plan.json" in plan("job.toml")
    assert json.loads((tmp_path / "plan.json").read_text())["microbatches"] == 8


def test_a_run_is_a_network(plan, tmp_path, capsys):
    """The links that it used are as fast as they were seen to be; those that it did not use, as they were measured."""
    spec, graph = _open_once(MODEL)
    folder = RunFolder(tmp_path / "run", JobConfig(model=spec.model, train=TrainConfig(microbatches=4)), graph,
                       resume=False)  # fmt: skip
    for name in ("anna", "bert", "carl"):
        folder.log(events.PeerJoined(name, 1e9, 2**32, 1.0))
    folder.log(events.PeerGone("carl", "it left"))
    last = json.loads(plan("--graph", MODEL, "--json", "--out", "p.json"))
    folder.log(events.Planned(
        read_plan(tmp_path / "p.json"), (1,) * len(last["stages"]), ("all",) * len(last["stages"]), 1,
        peers=(Peer("anna", 2e9, 2**32), Peer("bert", 1e9, 2**32)), links=(Link("anna", "bert", 1e3, 0.5),),
    ))  # fmt: skip
    uses = tuple(LinkUse(a, b, 4_000_000, 4_000_000, 1.0, 0.01) for a, b in (("anna", "bert"), ("bert", "anna")))
    report = StageReport(0, 0, "anna", True, {}, [], 2.0, (), uses, 0)
    folder.log(events.StepCommitted(1, 2, 1.0, (1.0,), 2.5, 10, 1.0, 1e-3, False, (report,)))
    folder.close()
    text = plan("run", network=False)
    assert "measured in the run: 2.5 s a step" in text
    assert "anna" in text and "carl" not in text
    assert json.loads(plan("--graph", MODEL, "run", "--json", network=False))["stages"]
    status.main(tmp_path / "run", tmp_path / "seen.toml")
    assert "step 1 of 2, loss 1.0000, 2.5 s a step" in capsys.readouterr().out
    seen = topology.parse((tmp_path / "seen.toml").read_text())
    assert {name: peer.flops for name, peer in seen.peers.items()} == {"anna": 2e9, "bert": 1e9}
    assert seen.link("anna", "bert").rate_bytes_per_s == pytest.approx(4e6, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--graph", MODEL], "say what to plan"),
        (["--topology", "net.toml"], "give a job file"),
        (["job.toml", "--graph", MODEL, "--topology", "net.toml"], "not both"),
        (["--graph", MODEL, "--topology", "net.toml", "--what-if", "faster"], "is not understood"),
        (["--graph", MODEL, "--topology", "net.toml", "--check", "none.json"], "cannot read the plan"),
        (["--graph", MODEL, "--topology", "net.toml", "--check", "other.json"], "it lacks 'graph_hash'"),
        (["--graph", MODEL, "--topology", "net.toml", "--out", "none/plan.json"], "there is no folder none"),
        (["--graph", MODEL, "--topology", "net.toml", "--svg", "none/step.svg"], "there is no folder none"),
        (["nowhere"], "say what to plan"),
    ],
)
def test_mistakes(plan, words, says):
    with pytest.raises(GeotrainError, match=says) as error:
        plan(*words, network=False)
    assert "\n" not in str(error.value)
