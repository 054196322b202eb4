"""Times blocks of a graph on this machine, with made-up tensors. I/O (a clock, and all of a device).

A block runs as it would in training: `StageRunner`, gradients added to what is there. The least of a few times
counts, as for the machine's own speed, since others may use the machine meanwhile.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .base import TensorSpec
from .blocks import BlockTime
from .graph import StageGraph
from .graph.ops import to_dtype
from .machine import measured_flops_per_s
from .stage import StageRunner

REPEATS = 5
BUDGET_S = 0.3
"""No further repeat of a block after so many seconds; at least one follows the first run, which warms up."""


def measure(
    blocks: Sequence[StageGraph],
    device: torch.device,
    threads: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, tuple[BlockTime, ...]]:
    """Times blocks. Returns the machine's FLOP/s meanwhile, as `measured_flops_per_s` counts them, and the times.

    Sets the calling thread's number of threads, and seeds torch's random generators.
    """
    flops_per_s = measured_flops_per_s(device, threads)
    times = tuple(_Block(graph, device, clock).time() for graph in blocks)
    return max(flops_per_s, measured_flops_per_s(device, threads)), times


class _Block:
    def __init__(self, graph: StageGraph, device: torch.device, clock: Callable[[], float]) -> None:
        self._graph, self._device, self._clock = graph, device, clock
        torch.manual_seed(0)
        specs = {name: value.spec for name, value in (*graph.values.items(), *graph.parameters.items())}
        self._received = {n: self._made_up(specs[n]) for n in (*graph.inputs, *(r.value for r in graph.receives))}
        self._grads = {name: self._made_up(specs[name]) for name in graph.grads_from}
        entries = {**graph.parameters, **graph.buffers}
        self._weights = {name: self._made_up(entry.spec) for name, entry in entries.items()}

    def time(self) -> BlockTime:
        frozen = {n: replace(p, requires_grad=False) for n, p in self._graph.parameters.items()}
        forward_s, backward_s = self._best(self._graph)
        _, input_gradient_s = self._best(replace(self._graph, parameters=frozen))
        input_gradient_s = min(input_gradient_s, backward_s)
        return BlockTime(forward_s, input_gradient_s, backward_s - input_gradient_s, self._saved_bytes())

    def _runner(self, graph: StageGraph) -> StageRunner:
        runner = StageRunner(graph, seed=0, num_microbatches=1, device=self._device)
        for name, tensor in self._weights.items():
            runner.load(name, tensor)
        return runner

    def _best(self, graph: StageGraph) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        runner, times, start = self._runner(graph), list[tuple[float, float]](), self._clock()
        for i in range(1 + REPEATS):
            begin = self._now()
            runner.forward(0, i, self._received)
            middle = self._now()
            runner.backward(i, self._grads)
            end = self._now()
            times.append((middle - begin, end - middle))
            if i and end - start > BUDGET_S:
                break
        return min(t for t, _ in times[1:]), min(t for _, t in times[1:])

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()

    def _saved_bytes(self) -> int:
        """Of the storages that autograd keeps after a forward, weights and received values left out."""
        runner, kept = self._runner(self._graph), dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.forward(0, 0, self._received)
        tensors: Mapping[str, Tensor] = {**runner.tensors, **self._received}
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        return sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)

    def _made_up(self, spec: TensorSpec) -> Tensor:
        """Small numbers about 1, so that roots and logarithms of them exist; of integers zeros, which are valid
        places in any table; of truths all true, so that a mask hides nothing."""
        dtype = to_dtype(spec.dtype)
        stride = spec.stride or torch.empty(spec.shape, device="meta").stride()
        span = 1 + sum((size - 1) * step for size, step in zip(spec.shape, stride, strict=True)) if spec.numel else 0
        memory = torch.empty(span, dtype=dtype, device=self._device)
        if memory.is_floating_point() or memory.is_complex():
            memory.normal_(1.0, 0.02)
        else:
            memory.fill_(dtype == torch.bool)
        return memory.as_strided(spec.shape, stride)
