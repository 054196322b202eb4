"""A pipeline in one process: stages pass tensors through the identity codec, as bytes, in one fixed order."""

from collections.abc import Collection, Sequence

import torch

from geotrain.codecs import Message, get_codec
from geotrain.graph import StageGraph, from_bytes, to_bytes
from geotrain.graph.serial import tensor_spec
from geotrain.stage import StageRunner

CPU = torch.device("cpu")


def across(tensor: torch.Tensor) -> torch.Tensor:
    """What arrives when `tensor` is sent with the identity codec."""
    codec = get_codec("identity")
    payload, _ = codec.encode(tensor, {}, Message(0))
    data = bytearray(b"".join(payload))
    assert len(data) == codec.size_bytes(tensor_spec(tensor))
    received, _ = codec.decode(memoryview(data), tensor_spec(tensor), CPU, {}, Message(0))
    assert received.shape == tensor.shape and received.dtype == tensor.dtype
    return received


class Pipeline:
    """All stages of a cut graph, loaded with a module's tensors (copied). `recompute`: the stages that run forward
    again for backward, by index."""

    def __init__(
        self,
        stages: Sequence[StageGraph],
        state: dict[str, torch.Tensor],
        seed: int = 0,
        microbatches: int = 1,
        recompute: Collection[int] = (),
    ):
        self.runners: list[StageRunner] = []
        for stage in stages:
            again = from_bytes(to_bytes(stage))
            assert again == stage and isinstance(again, StageGraph)
            runner = StageRunner(
                again, seed=seed, num_microbatches=microbatches, device=CPU, recompute=stage.index in recompute
            )
            for name in (*stage.parameters, *stage.buffers):
                runner.load(name, state[name].detach().clone())
            self.runners.append(runner)

    def step(self, step: int, batches: Sequence[dict[str, torch.Tensor]], evaluate: bool = False) -> list[torch.Tensor]:
        """All forwards, then all backwards (each in microbatch order). Returns the losses."""
        losses: list[torch.Tensor] = []
        for i, batch in enumerate(batches):
            values = dict(batch)
            for runner in self.runners:
                for send in runner.graph.sends:
                    if send.once:
                        values[send.value] = runner.tensors[send.value].detach()
                wanted = (*runner.graph.inputs, *(r.value for r in runner.graph.receives))
                received = {n: across(values[n]) for n in wanted}
                if evaluate:
                    sent, loss, _ = runner.evaluate(step, i, received)
                else:
                    sent, loss = runner.forward(step, i, received)
                values.update(sent)
                if loss is not None:
                    losses.append(loss)
        for i in () if evaluate else range(len(batches)):
            grads: dict[str, torch.Tensor | None] = {}
            for runner in reversed(self.runners):
                inward = {name: grads[name] for name in runner.graph.grads_from}
                outward = runner.backward(i, inward)
                grads.update({n: None if g is None else across(g) for n, g in outward.items()})
        return losses

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {n: p.grad for r in self.runners for n, p in r.parameters.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {n: r.tensors[n] for r in self.runners for n in r.graph.buffers if n not in r.graph.copies}
