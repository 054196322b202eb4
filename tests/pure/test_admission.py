"""What a stage lets in: exactly what its graph calls for."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from geotrain.admission import Admission, expectations
from geotrain.base import COORDINATOR, ONCE, FrameKey, TensorSpec
from geotrain.codecs import CODECS, get_codec
from geotrain.coding import input_frame
from geotrain.errors import RemoteProtocolError
from geotrain.graph import capture, cut


class Tied(nn.Module):
    """Both ends use one parameter, so that it crosses the cut once a step."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, tokens, labels):
        hidden = torch.tanh(self.middle(self.table(tokens)))
        return nn.functional.cross_entropy(hidden @ self.table.weight.T, labels)


@pytest.fixture(scope="module")
def stages():
    tokens = torch.zeros(6, dtype=torch.long)
    graph = capture(Tied(), {"tokens": tokens, "labels": tokens})
    return cut(graph, [next(i for i, op in enumerate(graph.ops) if "tanh" in op.target)])


NAMES = ("anna", "ben")


def doors(stages, index):
    return Admission(3, expectations(stages[index], NAMES), microbatches=2)


def forward_key(stage, once):
    (value,) = [receive.value for receive in stage.receives if receive.once == once]
    return FrameKey(3, 5, ONCE if once else 1, value, "F"), stage


def spec_of(stage, value):
    return (stage.values[value] if value in stage.values else stage.parameters[value]).spec


def test_what_the_graph_calls_for_comes_in(stages):
    last = stages[1]
    door = doors(stages, 1)
    for once in (False, True):
        key, _ = forward_key(last, once)
        spec = spec_of(last, key.value)
        door.check("anna", key, "identity", spec, spec.packed.nbytes)
        door.check("anna", replace(key, direction="E"), "identity", spec, spec.packed.nbytes)
    labels = spec_of(last, "labels")
    door.check(COORDINATOR, FrameKey(3, 0, 0, "labels", "F"), "identity", labels, labels.nbytes)
    door.check(COORDINATOR, FrameKey(3, 0, 17, "labels", "E"), "identity", labels, labels.nbytes)

    back = doors(stages, 0)
    for value in stages[0].grads_from:
        spec = spec_of(stages[0], value)
        back.check("ben", FrameKey(3, 5, 1, value, "B"), "identity", spec, spec.packed.nbytes)
        back.check("ben", FrameKey(3, 5, 1, value, "B"), "identity", TensorSpec((), "float32"), 0, absent=True)


@pytest.mark.parametrize(
    ("changes", "src", "codec"),
    [
        ({"epoch": 2}, "anna", "identity"),
        ({"direction": "B"}, "anna", "identity"),
        ({"value": "nothing"}, "anna", "identity"),
        ({"microbatch": 2}, "anna", "identity"),
        ({"microbatch": ONCE}, "anna", "identity"),
        ({"step": -1}, "anna", "identity"),
        ({}, "mallory", "identity"),
        ({}, COORDINATOR, "identity"),
    ],
)
def test_anything_else_is_refused(stages, changes, src, codec):
    key, last = forward_key(stages[1], once=False)
    spec = spec_of(last, key.value)
    with pytest.raises(RemoteProtocolError):
        doors(stages, 1).check(src, replace(key, **changes), codec, spec, spec.packed.nbytes)


def test_shapes_sizes_and_layouts_are_the_graphs(stages):
    key, last = forward_key(stages[1], once=False)
    spec, door = spec_of(last, key.value), doors(stages, 1)
    for wrong in [
        replace(spec, dtype="float64"),
        replace(spec, shape=(*spec.shape, 1)),
        replace(spec, shape=(1 << 40, 4)),
    ]:
        with pytest.raises(RemoteProtocolError):
            door.check("anna", key, "identity", wrong, spec.packed.nbytes)
    with pytest.raises(RemoteProtocolError, match="bytes"):
        door.check("anna", key, "identity", spec, spec.packed.nbytes - 1)
    with pytest.raises(RemoteProtocolError, match="without a value"):
        door.check("anna", key, "identity", spec, 0, absent=True)
    sliced = replace(spec, stride=(12, 1))  # a view of a fused projection
    door.check("anna", key, "identity", sliced, sliced.packed.nbytes)


class Wide(nn.Module):
    """What crosses its cut is large enough for a codec, and so is the parameter that both ends use."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.middle = nn.Linear(64, 64)

    def forward(self, tokens, labels):
        hidden = torch.tanh(self.middle(self.table(tokens)))
        return nn.functional.cross_entropy(hidden @ self.table.weight.T, labels)


@pytest.fixture(scope="module")
def wide():
    tokens = torch.zeros(32, dtype=torch.long)
    graph = capture(Wide(), {"tokens": tokens, "labels": tokens})
    return cut(graph, [next(i for i, op in enumerate(graph.ops) if "tanh" in op.target)])


def wide_doors(stages, index):
    return Admission(3, expectations(stages[index], NAMES), 2, codecs=("int8", "tcu-001"))


@pytest.mark.parametrize("codec", ["int8", "tcu-001"])
def test_what_a_gradient_flows_through_comes_by_the_codecs_of_the_run(wide, codec):
    key, last = forward_key(wide[1], once=False)
    spec = spec_of(last, key.value)
    nbytes = get_codec(codec).size_bytes(spec)
    wide_doors(wide, 1).check("anna", key, codec, spec, nbytes)
    wide_doors(wide, 0).check("ben", replace(key, direction="B"), codec, spec, nbytes)


@pytest.mark.parametrize("codec", ["magic", "topk-1", "pack", "hd4u"])
def test_no_other_codec_is_let_in(wide, codec):
    """Each of them costs memory and time of its own kind to read: only what a plan may name is worth that."""
    key, last = forward_key(wide[1], once=False)
    spec = spec_of(last, key.value)
    nbytes = get_codec(codec).size_bytes(spec) if codec in CODECS else spec.nbytes
    for src, index, direction in (("anna", 1, "F"), ("ben", 0, "B")):
        with pytest.raises(RemoteProtocolError, match="does not use"):
            wide_doors(wide, index).check(src, replace(key, direction=direction), codec, spec, nbytes)


def test_what_nothing_may_be_lost_of_comes_as_it_is(wide, stages):
    """Evaluations, parameters that two stages use, whole numbers and what is small."""
    int8 = get_codec("int8")
    key, last = forward_key(wide[1], once=False)
    once, _ = forward_key(wide[1], once=True)
    small, _ = forward_key(stages[1], once=False)
    refused = [
        (wide_doors(wide, 1), "anna", replace(key, direction="E"), spec_of(last, key.value)),
        (wide_doors(wide, 1), "anna", once, spec_of(last, once.value)),
        (wide_doors(wide, 0), "ben", replace(once, microbatch=1, direction="B"), spec_of(last, once.value)),
        (wide_doors(wide, 1), COORDINATOR, FrameKey(3, 0, 0, "labels", "F"), spec_of(last, "labels")),
        (wide_doors(stages, 1), "anna", small, spec_of(stages[1], small.value)),
    ]
    for door, src, of, spec in refused:
        door.check(src, of, "identity", spec, spec.packed.nbytes)
        with pytest.raises(RemoteProtocolError, match="does not use"):
            door.check(src, of, "int8", spec, int8.size_bytes(spec))


def test_whole_numbers_come_packed_from_the_coordinator_alone():
    tokens = torch.zeros(600, dtype=torch.long)
    graph = capture(Wide(), {"tokens": tokens, "labels": tokens.clone()})
    first, last = cut(graph, [next(i for i, op in enumerate(graph.ops) if "tanh" in op.target)])
    frame = input_frame(FrameKey(3, 0, 0, "tokens", "F"), torch.arange(600) % 40)
    assert (frame.codec, frame.spec) == ("pack", spec_of(first, "tokens")) and frame.nbytes < 620
    for direction in ("F", "E"):
        key = replace(frame.key, direction=direction)
        wide_doors([first], 0).check(COORDINATOR, key, frame.codec, frame.spec, frame.nbytes)
    with pytest.raises(RemoteProtocolError, match="has others"):
        wide_doors([first], 0).check(COORDINATOR, frame.key, "pack", frame.spec, frame.spec.nbytes + 2)
    key, _ = forward_key(last, once=False)
    with pytest.raises(RemoteProtocolError, match="does not use"):
        wide_doors([first, last], 1).check("anna", key, "pack", spec_of(last, key.value), 100)
