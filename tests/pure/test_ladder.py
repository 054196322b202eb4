"""What the planner is told of codecs is what they are."""

from itertools import pairwise

import pytest

from geotrain.base import Peer, TensorSpec
from geotrain.codecs import get_codec
from geotrain.codecs.ladder import BACKWARD, FORWARD, RAW, Rung
from geotrain.planner.build import borders, instance
from tests.pure.graphs import chain

MANY = TensorSpec((8, 128, 192), "float32")


@pytest.mark.parametrize("ladder", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_each_rung_has_fewer_bytes_and_costs_more(ladder: tuple[Rung, ...]) -> None:
    assert ladder[0] == RAW
    for light, heavy in pairwise(ladder):
        assert heavy.bytes_per_element < light.bytes_per_element and heavy.cost >= light.cost
    for rung in ladder:
        assert get_codec(rung.codec).size_bytes(MANY) / MANY.numel == pytest.approx(rung.bytes_per_element, rel=0.05)


def test_gradients_are_sent_without_bias() -> None:
    assert all(get_codec(r.codec).unbiased for r in BACKWARD if r.cost and r.codec != "int8")


@pytest.mark.parametrize(("rows", "suits"), [(1024, True), (40, False)])
def test_codecs_that_need_many_rows_have_the_bytes_of_what_replaces_them(rows: int, suits: bool) -> None:
    graph, peer = chain([192, 192, 192, 192], rows=rows), Peer("anna", 1e9, 1 << 30)
    problem = instance(
        graph, [peer], borders(graph, 2), microbatches=4, forward=FORWARD, backward=BACKWARD
    ).problem  # fmt: skip
    found = {rung.codec: rung.bytes_per_element for rung in (*problem.forward, *problem.backward)}
    own = {rung.codec: rung.bytes_per_element for rung in (*FORWARD, *BACKWARD)}
    assert found["bf16"] == pytest.approx(own["bf16"], rel=0.01)
    for name, simple in (("tcu-0025", "ec-0025"), ("tcm-2", "ecm-2")):
        if suits:
            assert found[name] == pytest.approx(own[name], rel=0.05)
        else:
            spec = TensorSpec((rows, 192), "float32")
            assert found[name] == pytest.approx(get_codec(simple).size_bytes(spec) / spec.numel, rel=0.01)
