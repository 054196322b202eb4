"""Which frames a peer takes: those that its stage's graph calls for, from those that the plan names. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .base import COORDINATOR, ONCE, Direction, FrameKey, TensorSpec
from .codecs import CODECS
from .codecs.sparse import PACK
from .coding import compressible, packs
from .config import TrainConfig
from .errors import RemoteProtocolError
from .graph import StageGraph
from .optim import PREFIX, state_names


@dataclass(frozen=True, slots=True)
class Expected:
    """What may come under a direction and name: from whom, of which shape, once a step or a microbatch, and whether
    with loss."""

    source: str
    shape: tuple[int, ...]
    dtype: str
    once: bool
    lossy: bool = False


Expectations = dict[tuple[Direction, str], Expected]


def expectations(stage: StageGraph, names: tuple[str, ...]) -> Expectations:
    """All that a stage may receive while it works; `names` are the peers by stage."""
    found: Expectations = {}

    def expect(direction: Direction, name: str, source: str, once: bool = False, lossy: bool = False) -> None:
        spec = stage.values[name].spec if name in stage.values else stage.parameters[name].spec
        found[direction, name] = Expected(source, spec.shape, spec.dtype, once, lossy)

    for name in stage.inputs:
        expect("F", name, COORDINATOR)
        expect("E", name, COORDINATOR)
    for receive in stage.receives:
        expect("F", receive.value, names[receive.source], receive.once, receive.grad and not receive.once)
        expect("E", receive.value, names[receive.source], receive.once)
    shared = {send.value for send in stage.sends if send.once}
    for name, source in stage.grads_from.items():
        expect("B", name, names[source], lossy=name not in shared)
    return found


def moved(stage: StageGraph, sources: Mapping[str, str], train: TrainConfig) -> Expectations:
    """The state that a stage takes over: `sources` are the peers that parameters and buffers come from."""
    found: Expectations = {}
    for name, source in sources.items():
        parameter = stage.parameters.get(name)
        entry = parameter or stage.buffers.get(name)
        if entry is None:
            raise RemoteProtocolError(f"the coordinator wants {name!r} moved, which the stage does not have")
        found["M", name] = Expected(source, entry.spec.shape, entry.spec.dtype, once=True)
        for full in state_names(train, name) if parameter is not None and parameter.requires_grad else ():
            is_count = full.startswith(f"{PREFIX}step/")
            shape, dtype = ((), "float32") if is_count else (entry.spec.shape, entry.spec.dtype)
            found["M", full] = Expected(source, shape, dtype, once=True)
    return found


class Admission:
    """Checks what a frame says of itself, before anything is allocated for it. `codecs` are those that the run may
    compress with. `check` raises `RemoteProtocolError`, which costs the sender its connection."""

    def __init__(self, epoch: int, expected: Expectations, microbatches: int, codecs: Collection[str] = ()) -> None:
        self._epoch = epoch
        self._microbatches = microbatches
        self._expected = expected
        self._codecs = frozenset(codecs)

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
            may_be = key.direction == "B" or (key.direction == "M" and key.value.startswith(PREFIX))
            if not may_be or nbytes:
                raise RemoteProtocolError(f"{src} sends {key.value!r} without a value")
            return
        if (spec.shape, spec.dtype) != (expected.shape, expected.dtype):
            raise RemoteProtocolError(f"{src} sends {key.value!r} as {spec}, which is not the graph's")
        coded = codec in self._codecs and expected.lossy and compressible(spec)
        packed = codec == PACK.name and src == COORDINATOR and packs(spec)
        if codec != "identity" and not coded and not packed:
            raise RemoteProtocolError(f"{src} sends {key.value!r} by {codec!r}, which this run does not use for it")
        if not CODECS[codec].accepts(spec, nbytes):
            raise RemoteProtocolError(f"{src} sends {nbytes} bytes of {key.value!r}, which has others")
