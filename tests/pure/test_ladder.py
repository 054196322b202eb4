"""What the planner is told of codecs is what they are."""

from dataclasses import replace
from itertools import pairwise

import pytest

from geotrain.base import Peer, TensorSpec
from geotrain.codecs import get_codec
from geotrain.codecs.ladder import BACKWARD, FORWARD, PRETRAINED_BACKWARD, PRETRAINED_FORWARD, RAW, Rung
from geotrain.config import parse_job
from geotrain.layout import ladders
from geotrain.planner.build import borders, instance
from tests.pure.graphs import chain

MANY = TensorSpec((8, 128, 192), "float32")


@pytest.mark.parametrize(
    "ladder", [FORWARD, BACKWARD, PRETRAINED_FORWARD, PRETRAINED_BACKWARD],
    ids=["forward", "backward", "pretrained forward", "pretrained backward"],
)  # fmt: skip
def test_each_rung_has_fewer_bytes_and_costs_more(ladder: tuple[Rung, ...]) -> None:
    assert ladder[0] == RAW
    for light, heavy in pairwise(ladder):
        assert heavy.bytes_per_element < light.bytes_per_element and heavy.cost >= light.cost
    for rung in ladder:
        assert get_codec(rung.codec).size_bytes(MANY) / MANY.numel == pytest.approx(rung.bytes_per_element, rel=0.05)


def test_gradients_are_sent_without_bias() -> None:
    rungs = (*BACKWARD, *PRETRAINED_BACKWARD)
    assert all(get_codec(r.codec).unbiased for r in rungs if r.cost and r.codec != "int8")


@pytest.mark.parametrize(
    ("model", "frozen", "pretrained"),
    [("", False, False), ("", True, True), ('kind = "hf"\npath = "m"', False, True),
     ('kind = "hf"\npath = "m"\nfresh = true', False, False)],
)  # fmt: skip
def test_weights_that_were_trained_before_have_ladders_of_their_own(model: str, frozen: bool, pretrained: bool) -> None:
    graph = chain([8, 8])
    if frozen:
        name, weight = next(iter(graph.parameters.items()))
        graph = replace(graph, parameters={**graph.parameters, name: replace(weight, requires_grad=False)})
    expected = (PRETRAINED_FORWARD, PRETRAINED_BACKWARD) if pretrained else (FORWARD, BACKWARD)
    assert ladders(parse_job(f"[model]\n{model}", "a job"), graph) == expected


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
