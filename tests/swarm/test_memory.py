"""What the planner expects of a stage's memory, against the peak of real peer processes."""

import pytest

from tests.benchmarks.memory import MIB, run, workloads


@pytest.mark.timeout(600)
def test_estimates_are_near_the_peak_and_recompute_lowers_both() -> None:
    chosen = workloads(short=True)
    kept, again = (run(chosen[name], steps=2) for name in ("GPT, all live", "GPT, all live, recomputing"))
    for measured in (*kept, *again):
        assert 0.8 <= measured.estimate / measured.peak <= 1.2, measured
    first = {m.peer: m.peak for m in kept}
    assert min(first[m.peer] - m.peak for m in again) > 50 * MIB
