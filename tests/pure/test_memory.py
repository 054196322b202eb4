"""What a stage holds, by hand."""

from geotrain.base import Peer
from geotrain.cost import CostTable
from geotrain.planner.memory import CODEC_BYTES, RUNTIME_BYTES, STEPS_AHEAD, stage_memory, usable_bytes, ways_out
from tests.pure.graphs import chain

GRAPH = chain([8, 16, 4], rows=4)  # linear0 relu0 linear1 relu1 loss
INPUT, MIDDLE = 4 * 4 * 8, 4 * 4 * 16


def test_recompute_keeps_what_came_and_one_microbatch() -> None:
    table = CostTable(GRAPH, [0, 2, 5])
    memory = stage_memory(table, 6)
    for s, received in enumerate((INPUT, MIDDLE)):
        live = table.stage(s, s + 1).activation_bytes_per_microbatch
        plain, again = (float(memory.peak(3, recompute)[s, s + 1]) for recompute in (False, True))
        assert again - plain == live + 3 * received - 3 * live
    assert memory.peak(1, False)[0, 1] == RUNTIME_BYTES + table.stage(0, 1).memory_bytes(1) + STEPS_AHEAD * 6 * INPUT


def test_codecs_count() -> None:
    table = CostTable(GRAPH, [0, 5])
    plain, coded = stage_memory(table, 1), stage_memory(table, 1, lossy=True, residual_bytes=7)
    assert (coded.state - plain.state)[0, 1] == CODEC_BYTES + 7


def test_a_refusal_says_what_to_do() -> None:
    peer = Peer("attic", 1e9, 2**30)
    line = ways_out(peer.name, 2**30, usable_bytes(peer), 3, False)
    assert "attic needs 1.00 GiB with 3 live microbatches and may use 0.80 GiB" in line
    assert "more peers" in line and "microbatch smaller" in line and "recompute" in line
