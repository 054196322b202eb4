"""A plan as the simulator plays it: what each stage computes and sends. Pure."""

from collections.abc import Mapping, Sequence

from .base import Direction, Link, Peer, Plan, TensorSpec
from .blocks import CostModel
from .codecs import get_codec
from .codecs.ladder import Rates
from .coding import Codecs, choose
from .graph import StageGraph
from .simulator import Message, StageTimes, Workload


def workload(
    plan: Plan,
    stages: Sequence[StageGraph],
    costs: CostModel,
    peers: Sequence[Peer],
    links: Sequence[Link] = (),
    codecs: Mapping[str, Rates] | None = None,
    commit_s: float = 0.0,
) -> Workload:
    """The step of a plan whose cuts made `stages`, over `peers` (their uplinks and downlinks too) and `links`, with
    what is known of `codecs` by name."""
    by_name = {peer.name: peer for peer in peers}
    times: list[StageTimes] = []
    messages: list[Message] = []
    for part, stage in zip(plan.stages, stages, strict=True):
        forward_s, backward_s = costs.seconds(by_name[part.peer], part.first_op, part.end_op)
        times.append(StageTimes(part.peer, forward_s, backward_s + forward_s * part.recompute, part.window))
        messages += _messages(stage, Codecs(part.codec_forward, part.codec_backward), codecs or {})
    readers: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.inputs:
            readers.setdefault(name, []).append(stage.index)
    for name, to in readers.items():
        messages.append(Message("F", None, tuple(to), _spec(stages[to[0]], name).packed.nbytes))
    names = {part.peer for part in plan.stages}
    up = {name: by_name[name].up_bytes_per_s for name in names}
    down = {name: by_name[name].down_bytes_per_s for name in names}
    return Workload(
        plan.schedule, plan.microbatches, tuple(times), tuple(messages), tuple(links), _limits(up), _limits(down),
        commit_s,
    )  # fmt: skip


def _messages(stage: StageGraph, codecs: Codecs, rates: Mapping[str, Rates]) -> list[Message]:
    def message(direction: Direction, value: str, to: tuple[int, ...], lossy: bool, once: bool) -> Message:
        spec = _spec(stage, value)
        codec, numel = choose(codecs, direction, spec, lossy), spec.packed.numel
        of = rates.get(codec, Rates(0.0, 0.0))
        nbytes = get_codec(codec).size_bytes(spec) if of.nbytes is None else numel * of.nbytes
        return Message(direction, stage.index, to, nbytes, numel * of.encode_s, numel * of.decode_s, once)

    sent = [message("F", s.value, tuple(s.to), s.grad and not s.once, s.once) for s in stage.sends]
    back = [message("B", r.value, (r.grad_to,), not r.once, False) for r in stage.receives if r.grad]
    return sent + back


def _spec(stage: StageGraph, name: str) -> TensorSpec:
    return stage.values[name].spec if name in stage.values else stage.parameters[name].spec


def _limits(rates: Mapping[str, float]) -> dict[str, float]:
    return {name: rate for name, rate in rates.items() if rate < float("inf")}
