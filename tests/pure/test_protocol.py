"""Control messages: what goes in comes out, and nothing else gets in."""

import math
import random
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain import protocol
from geotrain.base import CodecUse, LinkUse, Span, StageReport, TensorSpec, Trial
from geotrain.blocks import BlockTime
from geotrain.errors import RemoteProtocolError

REPORT = StageReport(
    step=3, stage=1, peer="anna", finite=True, norms={"w": 1.5, "b": math.inf}, losses=[2.0, 1.0],
    seconds=0.5, spans=(Span("compute", "1F0", 0.0, 0.25),), links=(LinkUse("anna", "ben", 10, 8, 0.1, None),),
    memory_bytes=7, codecs=(CodecUse("F", "int8", 100, 400, 100, 0.1, 0.1, 400, 1, 0.01, 1.0),),
)  # fmt: skip

SPEC = protocol.NamedSpec("w", TensorSpec((2, 3), "float32", (1, 2)))

EXAMPLES = [
    protocol.Hello(1, "r", b"secret", "anna", 1e9, 1 << 40, 0.5, "127.0.0.1:1", "cpu"),
    protocol.Surveyed(1, REPORT.links, 1e9, (BlockTime(0.1, 0.1, 0.2, 100),)),
    protocol.Loaded(1, 0, 5),
    protocol.Ready(1, REPORT),
    protocol.Tried(1, Trial(3, 0, 2.0, 2.1, 0.1, (5.0, 5.1))),
    protocol.Scored(1, 4, (1.0, 2.0)),
    protocol.Continued(1, 5, (7, 0)),
    protocol.Saved(1, 2, 0),
    protocol.Progress(1, 2, "computing"),
    protocol.Failed(1, "no memory"),
    protocol.Leaving(),
    protocol.Welcome("r", 1.0),
    protocol.Survey(1, {"anna": "h:1"}, (b"\x00block",)),
    protocol.Meet(1, {"carl": "h:1"}),
    protocol.Probe(1, "ben", 1 << 16),
    protocol.Prepare(
        2, 0, 1, b"\x00graph", ("1F0", "1B0"), "{}", 7, ("anna",), {"anna": "h:1"}, (SPEC,),
        (protocol.Holder("h:2", ("w",)),), (protocol.Move("w", "ben"),),
        (protocol.Gift("b", ("ben", "carl")),), "int8", "hd4u", ("hd4u", "int8"), True,
    ),
    protocol.Release(3, 7, {"anna": "h:1"}, (protocol.Gift("b", ("ben",)),)),
    protocol.Prefetch(2, (SPEC,), (protocol.Holder("h:1", ("w",)),)),
    protocol.Prefetched(2, "w", 24),
    protocol.Instruct(
        2,
        (
            protocol.Gradients(3), protocol.Try(4), protocol.Codecs(("int8",), ("identity",)),
            protocol.Commit(3, 0.5, 1e-3, False), protocol.Evaluate(4, 2), protocol.Checkpoint(4), protocol.Train(4),
            protocol.Continue(5, (3, 0)),
        ),
    ),
    protocol.Leave("done"),
    protocol.Fetch("r", b"t", "anna", 1, ("w", "b"), 0),
    protocol.FetchShared("r", b"t", ("00ff",), 7),
    protocol.Store("r", b"t", 1, 0, 2, False, (protocol.NamedSpec("w", TensorSpec((), "bfloat16")),)),
]  # fmt: skip


def test_every_kind_round_trips():
    kinds = protocol.Message.__args__
    assert {type(example) for example in EXAMPLES} == set(kinds)
    for example in EXAMPLES:
        assert protocol.decode(protocol.encode(example), protocol.Message) == example


@given(st.builds(protocol.Progress, st.integers(0, 2**63), st.integers(0, 2**63), st.text(max_size=100)))
def test_progress_round_trips(message):
    assert protocol.decode(protocol.encode(message), protocol.FromPeer) == message


def test_nan_survives():
    message = protocol.decode(protocol.encode(protocol.Scored(1, 1, (math.nan,))), protocol.Scored)
    assert math.isnan(message.losses[0])


def test_a_kind_for_the_other_side_is_refused():
    with pytest.raises(RemoteProtocolError, match="not expected here"):
        protocol.decode(protocol.encode(protocol.Leave("x")), protocol.FromPeer)


@pytest.mark.parametrize(
    "body",
    [
        ["Loaded", 1],  # too few fields
        ["Loaded", 1, 2, 3, 4],  # too many
        ["Saved", 1, 2],  # another record
        ["Loaded", True, 2, 0],  # bool is not int
        ["Loaded", "1", 2, 0],
        ["Loaded", 1.0, 2, 0],
        {"epoch": 1, "stage": 2},
        [],
        None,
        [["Loaded"], 1, 2, 0],
    ],
)
def test_wrong_shapes_are_refused(body):
    kind = protocol.encode(protocol.Loaded(1, 2, 0))[:1]
    with pytest.raises(RemoteProtocolError, match="malformed Loaded"):
        protocol.decode(kind + msgpack.packb(body), protocol.FromPeer)


def test_an_unknown_instruction_is_refused():
    data = protocol.encode(protocol.Instruct(1, (protocol.Train(4),))).replace(b"Train", b"Brain")
    with pytest.raises(RemoteProtocolError, match="none of"):
        protocol.decode(data, protocol.FromCoordinator)


def test_each_kind_has_its_own_bound():
    with pytest.raises(RemoteProtocolError, match="over"):
        protocol.encode(protocol.Progress(1, 1, "x" * 40_000))
    kind = protocol.encode(protocol.Leaving())[:1]
    with pytest.raises(RemoteProtocolError, match="over"):
        protocol.decode(kind + b"\xc1" * 2000, protocol.FromPeer)


def test_deep_nesting_is_refused():
    kind = protocol.encode(protocol.Failed(1, ""))[:1]
    with pytest.raises(RemoteProtocolError):
        protocol.decode(kind + b"\x91" * 60_000 + b"\x00", protocol.FromPeer)


def test_mutated_messages_raise_only_our_error():
    generator = random.Random(7)
    encoded = [protocol.encode(example) for example in EXAMPLES]
    refused = 0
    for i in range(10_000):
        data = bytearray(encoded[i % len(encoded)])
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        try:
            message = protocol.decode(bytes(data), protocol.Message)
        except RemoteProtocolError:
            refused += 1
        else:
            assert all(getattr(message, field.name) is not None for field in fields(message))
    assert refused > 5000
