"""A run over links that the kernel shapes: processes as users start them, each in a network of its own."""

import statistics

import pytest

from tests import netswarm
from tests.wan import Home, Wan, lacking

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(lacking()), reason=lacking())]

JOB = """
[model]
layers = 3
hidden = 64
context = 64

[train]
steps = 6
microbatches = 4
warmup_steps = 1

[pipeline]
peers = 3
stages = 3

[evaluate]
microbatches = 2
"""


def test_a_run_between_homes(tmp_path):
    """One home is behind NAT: who cannot be dialed dials."""
    with Wan([Home(5, 20, nat=True), Home(20), Home(50, 100)], delay_ms=10) as wan:
        seen = netswarm.run(
            wan, JOB, tmp_path, peers=("anna", "ben", "cleo"), until=netswarm.evaluated(6), timeout_s=120
        )
    steps = netswarm.steps(seen)
    losses = [step.event["loss"] for step in steps]
    held_out = [s.event["loss"] for s in seen if s.event["event"] == "Evaluated"]
    assert losses[-1] < losses[0]
    assert held_out[-1] < held_out[0]
    for peer in range(3):  # the stages' values went over these cables
        assert steps[-1].sent[peer] > steps[0].sent[peer]
    assert statistics.median(step.event["seconds"] for step in steps) > 2 * 2 * 0.01
