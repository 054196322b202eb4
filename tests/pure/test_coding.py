"""Which codec a message takes, and what a step's bytes depend on."""

from dataclasses import replace

import pytest
import torch

from geotrain.base import CODED_TRIAL, RAW_TRIAL, Frame, FrameKey
from geotrain.codecs import CODECS, message_key
from geotrain.coding import SAMPLED, Codecs, Decoder, Encoder
from geotrain.graph import cut
from tests.pure.graphs import chain

CPU = torch.device("cpu")
_ROWS, _WIDTH = 64, 32


def sender(codec: str) -> Encoder:
    """Of the first of two stages, which sends `relu0`."""
    stage = cut(chain([_WIDTH, _WIDTH, _WIDTH], rows=_ROWS), [2])[0]
    assert [send.value for send in stage.sends] == ["relu0"]
    return Encoder(stage, Codecs(codec, codec), seed=5, clock=lambda: 0.0)


def activation(step: int, microbatch: int) -> torch.Tensor:
    """Of few axes, which turn from step to step."""
    random = torch.Generator().manual_seed(1000 * step + microbatch)
    axes = torch.linalg.qr(torch.randn(_WIDTH, _WIDTH, generator=torch.Generator().manual_seed(step))).Q
    return (torch.randn(_ROWS, _WIDTH, generator=random) * 2.0 ** -torch.arange(_WIDTH)) @ axes


def frames(encoder: Encoder, step: int, attempt: int = 0, epoch: int = 1) -> list[Frame]:
    found: list[Frame] = []
    for microbatch in range(3):
        key, x = FrameKey(epoch, step, microbatch, "relu0", "F", attempt), activation(step, microbatch)
        found.append(encoder.encode(key, x, encoder.codec_for(key, x)))
    return found


def joined(frame: Frame) -> bytes:
    return b"".join(bytes(part) for part in frame.payload)


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_of_a_step_depend_on_no_other_step_epoch_or_trial(codec: str) -> None:
    """So a step that is done again, or by stages that have just come, is what it was."""
    old, new = sender(codec), sender(codec)
    before = Decoder(CPU, seed=5)
    for frame in [*frames(old, 1), *frames(old, 2), *frames(old, 3, CODED_TRIAL)]:
        arrived = Frame(frame.key, frame.codec, frame.spec, [memoryview(bytearray(joined(frame)))])
        assert before.decode(arrived) is not None
    first, again = frames(old, 3), frames(new, 3, epoch=2)
    assert [f.codec for f in first] == [codec] * 3
    assert [joined(f) for f in first] == [joined(f) for f in again]
    after = Decoder(CPU, seed=5)
    for frame in first:
        arrived = replace(frame, payload=[memoryview(bytearray(joined(frame)))])
        one, other = before.decode(arrived), after.decode(arrived)
        assert one is not None and other is not None and torch.equal(one, other)


def test_a_step_shares_what_its_first_message_tells() -> None:
    encoder = sender("tcm-1")
    sizes = [len(joined(frame)) for frame in frames(encoder, 0)]
    assert max(sizes[1:]) < 0.8 * sizes[0]


def test_what_is_small_or_whole_or_tried_without_codecs_travels_as_it_is() -> None:
    encoder, x = sender("tcm-1"), activation(0, 0)
    key = FrameKey(1, 0, 0, "relu0", "F")
    assert encoder.codec_for(key, x) == "tcm-1"
    assert encoder.codec_for(replace(key, attempt=RAW_TRIAL), x) == "identity"
    assert encoder.codec_for(replace(key, value="x"), x) == "identity"
    assert encoder.codec_for(key, x[:4]) == encoder.codec_for(key, x.long()) == "identity"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_counted_and_tells_nothing_of_the_codec(bad: float) -> None:
    encoder, x = sender("tcm-1"), activation(0, 0)
    keys = [FrameKey(1, step, 0, "relu0", "F") for step in range(200)]
    key = next(key for key in keys if message_key(5, key) % SAMPLED == 0)
    encoder.encode(key, x, "tcm-1")
    (sound,) = encoder.take()
    assert (sound.samples, sound.not_finite) == (1, 0) and 0 < sound.error < 0.2
    x[3, 4] = bad
    frame = encoder.encode(key, x, "tcm-1")
    (broken,) = encoder.take()
    assert (broken.samples, broken.not_finite, broken.error) == (0, 1, 0.0)
    arrived = Decoder(CPU, seed=5).decode(replace(frame, payload=[memoryview(bytearray(joined(frame)))]))
    assert arrived is not None and arrived.equal(x) if bad == bad else torch.isnan(arrived[3, 4])
