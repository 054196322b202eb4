"""Which frames a stage takes: those that its graph calls for, from those that the plan names. Pure."""

from dataclasses import dataclass

from .base import COORDINATOR, ONCE, Direction, FrameKey, TensorSpec
from .codecs import CODECS
from .errors import RemoteProtocolError
from .graph import StageGraph


@dataclass(frozen=True, slots=True)
class Expected:
    """What may come under a direction and name: from whom, of which shape, once a step or a microbatch."""

    source: str
    shape: tuple[int, ...]
    dtype: str
    once: bool


def expectations(stage: StageGraph, names: tuple[str, ...]) -> dict[tuple[Direction, str], Expected]:
    """All that a stage may receive; `names` are the peers by stage."""
    found: dict[tuple[Direction, str], Expected] = {}

    def expect(direction: Direction, name: str, source: str, once: bool = False) -> None:
        spec = stage.values[name].spec if name in stage.values else stage.parameters[name].spec
        found[direction, name] = Expected(source, spec.shape, spec.dtype, once)

    for name in stage.inputs:
        expect("F", name, COORDINATOR)
        expect("E", name, COORDINATOR)
    for receive in stage.receives:
        expect("F", receive.value, names[receive.source], receive.once)
        expect("E", receive.value, names[receive.source], receive.once)
    for name, source in stage.grads_from.items():
        expect("B", name, names[source])
    return found


class Admission:
    """Checks what a frame says of itself, before anything is allocated for it. `check` raises
    `RemoteProtocolError`, which costs the sender its connection."""

    def __init__(self, epoch: int, stage: StageGraph, names: tuple[str, ...], microbatches: int) -> None:
        self._epoch = epoch
        self._microbatches = microbatches
        self._expected = expectations(stage, names)

    def check(self, src: str, key: FrameKey, codec: str, spec: TensorSpec, nbytes: int, absent: bool = False) -> None:
        expected = self._expected.get((key.direction, key.value))
        if key.epoch != self._epoch or expected is None or src != expected.source:
            raise RemoteProtocolError(f"{src} sends {key.direction} {key.value!r}, which is not expected")
        once = expected.once and key.direction != "B"
        evaluating = key.direction == "E"
        if key.step < 0 or (key.microbatch != ONCE if once else not 0 <= key.microbatch):
            raise RemoteProtocolError(f"{src} sends a frame of no microbatch")
        if not evaluating and not once and key.microbatch >= self._microbatches:
            raise RemoteProtocolError(f"{src} sends microbatch {key.microbatch} of {self._microbatches}")
        if absent:
            if key.direction != "B" or nbytes:
                raise RemoteProtocolError(f"{src} sends {key.value!r} without a value")
            return
        if (spec.shape, spec.dtype) != (expected.shape, expected.dtype):
            raise RemoteProtocolError(f"{src} sends {key.value!r} as {spec}, which is not the graph's")
        if codec not in CODECS or not CODECS[codec].accepts(spec, nbytes):
            raise RemoteProtocolError(
                f"{src} sends {nbytes} bytes of {key.value!r}, which has others, or another codec"
            )
