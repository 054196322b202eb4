"""Tensors to frames and back: which codec for which message, the codecs' states, and how well they do. Pure.

Only values that a gradient flows back through are compressed with loss. Parameters that stages share, evaluations and
small tensors travel as they are; whole numbers that are inputs of the model, such as tokens, in as few bytes as the
largest needs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .base import RAW_TRIAL, CodecUse, Direction, Frame, FrameKey, TensorSpec
from .codecs import Message, Payload, State, get_codec, message_key
from .codecs.identity import from_raw, raw
from .codecs.lossy import RAW
from .codecs.sparse import PACK, WHOLE
from .graph import StageGraph
from .graph.serial import tensor_spec

SMALL_BYTES = 4096
"""Smaller tensors are not worth a codec: a frame's header and the link's delay weigh more."""

FLOATS = ("float32", "bfloat16", "float16")

SAMPLED = 16
"""One message of so many is decoded again by its sender, to see what the codec does to it."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """What a stage compresses with: the values that it sends, and the gradients that it sends."""

    forward: str = "identity"
    backward: str = "identity"


def compressible(spec: TensorSpec) -> bool:
    """Whether a codec may be worth it, for a value that may be compressed at all."""
    return spec.dtype in FLOATS and spec.nbytes >= SMALL_BYTES


def choose(codecs: Codecs, direction: Direction, spec: TensorSpec, lossy: bool) -> str:
    """The codec of a message. `lossy`: a gradient flows back through the value, and it is no shared parameter."""
    if not lossy or not compressible(spec):
        return "identity"
    return codecs.forward if direction == "F" else codecs.backward


class States:
    """The states of one side's codecs, by codec, direction and value. A state lasts for one step, or for a trial of it:
    so a step has the same bytes wherever its stages are, whenever they came there, and however often it is done, and
    no state is ever saved or moved."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str, str], tuple[tuple[int, int], State]] = {}

    def get(self, codec: str, key: FrameKey, spec: TensorSpec) -> State:
        of, state = self._states.get((codec, key.direction, key.value), (None, {}))
        return state if of == (key.step, key.attempt) else get_codec(codec).init(spec)

    def set(self, codec: str, key: FrameKey, state: State) -> None:
        self._states[codec, key.direction, key.value] = (key.step, key.attempt), state


class Encoder:
    """What one stage sends. Not safe for two threads at once, and keeps the order of messages."""

    def __init__(self, stage: StageGraph, codecs: Codecs, *, seed: int, clock: Callable[[], float]) -> None:
        self._lossy = {("F", s.value) for s in stage.sends if s.grad and not s.once}
        self._lossy |= {("B", r.value) for r in stage.receives if r.grad and not r.once}
        self.codecs = codecs
        self.states = States()
        self._seed, self._clock = seed, clock
        self._uses: dict[tuple[str, str], CodecUse] = {}

    def codec_for(self, key: FrameKey, tensor: Tensor) -> str:
        """The codec of a message under the codecs in force."""
        if key.attempt == RAW_TRIAL:
            return "identity"
        return choose(self.codecs, key.direction, tensor_spec(tensor), (key.direction, key.value) in self._lossy)

    def encode(self, key: FrameKey, tensor: Tensor, codec: str) -> Frame:
        """The frame of a tensor, with a codec that `codec_for` named."""
        spec = tensor_spec(tensor)
        finite = True
        if codec == "identity":
            payload, seconds = raw(tensor), 0.0
        else:
            start_s = self._clock()
            message = Message(message_key(self._seed, key))
            before = self.states.get(codec, key, spec)
            payload, state = get_codec(codec).encode(tensor, before, message)
            self.states.set(codec, key, state)
            seconds = self._clock() - start_s
            finite = payload[0][0] != RAW or bool(torch.isfinite(tensor).all())
            if message.key % SAMPLED == 0 and finite:
                self._sample(codec, key, tensor, payload, before, message)
        frame = Frame(key, codec, spec, list(payload))
        use = self._use(codec, key)
        self._uses[use.direction, codec] = replace(
            use, elements=use.elements + spec.packed.numel, raw_bytes=use.raw_bytes + spec.packed.nbytes,
            wire_bytes=use.wire_bytes + frame.nbytes, encode_s=use.encode_s + seconds,
            not_finite=use.not_finite + (not finite),
        )  # fmt: skip
        return frame

    def take(self) -> tuple[CodecUse, ...]:
        """What was encoded since this was last asked."""
        uses, self._uses = tuple(self._uses.values()), {}
        return uses

    def _use(self, codec: str, key: FrameKey) -> CodecUse:
        return self._uses.get((key.direction, codec)) or CodecUse(key.direction, codec)

    def _sample(
        self, codec: str, key: FrameKey, tensor: Tensor, payload: Payload, state: State, message: Message
    ) -> None:
        start_s = self._clock()
        data = memoryview(b"".join(payload))
        decoded, _ = get_codec(codec).decode(data, tensor_spec(tensor), tensor.device, state, message)
        seconds = self._clock() - start_s
        x, y = tensor.detach().flatten().to(torch.float64), decoded.flatten().to(torch.float64)
        energy = float(x @ x)
        error, gain = (float((x - y) @ (x - y)) / energy, float(x @ y) / energy) if energy > 0 else (0.0, 1.0)
        use = self._use(codec, key)
        self._uses[use.direction, codec] = replace(
            use, decode_s=use.decode_s + seconds, sampled_bytes=use.sampled_bytes + tensor_spec(tensor).packed.nbytes,
            samples=use.samples + 1, error=use.error + error, gain=use.gain + gain,
        )  # fmt: skip


class Decoder:
    """What one stage receives. Not safe for two threads at once."""

    def __init__(self, device: torch.device, *, seed: int) -> None:
        self.states = States()
        self._device, self._seed = device, seed

    def decode(self, frame: Frame) -> Tensor | None:
        """The tensor of a frame, None if it is absent. Raises `RemoteProtocolError` for a payload of no sense."""
        if frame.absent:
            return None
        payload: Any = frame.payload[0] if frame.payload else memoryview(b"")
        if frame.codec == "identity":
            return from_raw(payload, frame.spec, self._device)
        state = self.states.get(frame.codec, frame.key, frame.spec)
        message = Message(message_key(self._seed, frame.key))
        tensor, state = get_codec(frame.codec).decode(payload, frame.spec, self._device, state, message)
        self.states.set(frame.codec, frame.key, state)
        return tensor


def packs(spec: TensorSpec) -> bool:
    """Whether a model's input is packed, without loss."""
    return spec.dtype in WHOLE and spec.nbytes >= SMALL_BYTES


def input_frame(key: FrameKey, tensor: Tensor) -> Frame:
    """The frame of a model's input."""
    spec = tensor_spec(tensor)
    if not packs(spec):
        return raw_frame(key, tensor)
    payload, _ = PACK.encode(tensor, {}, Message(0))
    return Frame(key, PACK.name, spec, list(payload))


def raw_frame(key: FrameKey, tensor: Tensor) -> Frame:
    """The frame of a tensor as it is."""
    return Frame(key, "identity", tensor_spec(tensor), list(raw(tensor)))


def absent(key: FrameKey) -> Frame:
    """The frame that says that there is no tensor."""
    return Frame(key, "identity", TensorSpec((), "float32"), [], absent=True)
