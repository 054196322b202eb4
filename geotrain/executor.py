"""Carries out a stage's actions, step by step, in the compute thread of a peer. I/O (threads and a clock).

Compute never waits for a send: what is to be sent is handed over and forgotten. It waits only for what has not
arrived yet, and keeps account of every second: spans of compute, of waiting (for which value, from whom) and of
the rest that a duty cap asks for.
"""

import math
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from . import optim
from .base import CODED_TRIAL, COORDINATOR, ONCE, RAW_TRIAL, Action, Direction, FrameKey, Span, StageReport, Trial
from .config import TrainConfig
from .errors import GeotrainError
from .graph import LOGITS, StageGraph
from .stage import StageRunner

T = TypeVar("T")
Send = Callable[[list[int], FrameKey, Tensor | None], None]

_SHORTEST_SPAN_S = 50e-6
"""A wait shorter than this is a look into the mailbox; it is not worth a line in the timeline."""


class Aborted(GeotrainError):
    """The epoch is over; the step at hand did not happen."""


class Mailbox:
    """What has arrived and was not yet asked for. `put` comes from the event loop, `take` from the compute thread."""

    def __init__(self) -> None:
        self._arrived: dict[FrameKey, Tensor | None] = {}
        self._changed = threading.Condition()
        self._aborted = False
        self.waiting_for: str | None = None

    def put(self, key: FrameKey, tensor: Tensor | None) -> None:
        with self._changed:
            if not self._aborted:
                self._arrived[key] = tensor
                self._changed.notify()

    def take(self, key: FrameKey, description: str) -> Tensor | None:
        """Waits for one tensor (None: told that there is none). Raises `Aborted`."""
        with self._changed:
            while key not in self._arrived:
                if self._aborted:
                    raise Aborted("the epoch is over")
                self.waiting_for = description
                self._changed.wait()
            self.waiting_for = None
            if self._aborted:
                raise Aborted("the epoch is over")
            return self._arrived.pop(key)

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._arrived.clear()
            self._changed.notify()


class StageWorker:
    """One stage of one epoch: its runner, its optimizer, its mailbox.

    Args:
        tensors: the stage's parameters and buffers by name, on `device`; used as they are, not copied.
        actions: its part of the schedule (F and B).
        send: takes (stages, key, tensor or None) and returns at once.
        recompute: keep only what a microbatch received, and run it forward again for backward.
        duty: share of the time that this peer may compute; after each action it rests accordingly.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        stage: StageGraph,
        tensors: Mapping[str, Tensor],
        train: TrainConfig,
        actions: Sequence[Action],
        *,
        epoch: int,
        device: torch.device,
        seed: int,
        send: Send,
        duty: float = 1.0,
        recompute: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._actions = tuple(actions)
        self._epoch, self._device, self._send, self._clock = epoch, device, send, clock
        self.duty = duty
        self._mailbox = Mailbox()
        self._runner = StageRunner(
            stage, seed=seed, num_microbatches=train.microbatches, device=device, recompute=recompute
        )
        for name, tensor in tensors.items():
            self._runner.load(name, tensor)
        self._parameters = self._runner.parameters
        self._optimizer = optim.build(self._parameters, train) if self._parameters else None
        self._gradients: dict[str, Tensor] = {}
        self._spans: list[Span] = []
        self._start_s = clock()
        self._attempt = 0

    # From other threads.

    def put(self, key: FrameKey, tensor: Tensor | None) -> None:
        self._mailbox.put(key, tensor)

    def abort(self) -> None:
        """Whatever the compute thread waits for, it gets `Aborted`."""
        self._mailbox.abort()

    @property
    def waiting_for(self) -> str | None:
        return self._mailbox.waiting_for

    # In the compute thread.

    def train(self, step: int) -> StageReport:
        """Forward and backward of all microbatches; gradients are left in place for `commit`. Raises `Aborted`."""
        self._spans, self._start_s = [], self._clock()
        self._gradients = {}
        losses: list[Tensor] = []
        shared = self._exchange_shared(step, "F")
        for action in self._actions:
            if action.kind == "F":
                received = {**shared, **self._take_values(step, action.microbatch, "F")}
                loss = self._compute(str(action), lambda a=action, r=received: self._forward(step, a.microbatch, r))
                if loss is not None:
                    losses.append(loss)
            elif action.kind == "B":
                grads = self._take_gradients(step, action.microbatch)
                self._compute(str(action), lambda a=action, g=grads: self._backward(step, a.microbatch, g))
            else:
                raise NotImplementedError(f"{action}: split backward is not built yet")
        norms = self._compute("norms", self._norms)
        return StageReport(
            step=step,
            stage=self._stage.index,
            peer="",
            finite=all(math.isfinite(norm) for norm in norms.values()),
            norms=norms,
            losses=[float(loss) for loss in losses],
            seconds=self._clock() - self._start_s,
            spans=tuple(self._spans),
            links=(),
            memory_bytes=_peak_memory_bytes(self._device),
        )

    def commit(self, step: int, clip_factor: float, lr: float, skip: bool) -> None:
        """Applies the gradients of `step` (or, with `skip`, drops them) and forgets them."""
        if not skip and self._optimizer is not None:
            with torch.no_grad():
                for parameter in self._parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(clip_factor)
            optim.set_lr(self._optimizer, lr)
            self._optimizer.step()
        self._gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None

    def evaluate(self, step: int, count: int) -> list[float]:
        """Forward passes over `count` held-out microbatches. The losses, where the stage makes them."""
        made = [loss for loss, _ in self._evaluations(step, count) if loss is not None]
        return [float(loss) for loss in made]

    def successors(self, step: int, places: Sequence[int]) -> list[int]:
        """One forward pass: by row the likeliest token after that place, if the stage makes the logits [B, T, V]."""
        ((_, outputs),) = self._evaluations(step, 1)
        if LOGITS not in outputs:
            return []
        rows = torch.arange(len(places), device=self._device)
        return outputs[LOGITS][rows, torch.tensor(places, device=self._device)].argmax(-1).tolist()

    def _evaluations(self, step: int, count: int) -> Iterator[tuple[Tensor | None, dict[str, Tensor]]]:
        """Loss and outputs, as far as they are made here, of forward passes."""
        shared = self._exchange_shared(step, "E")
        for i in range(count):
            received = {**shared, **self._take_values(step, i, "E")}
            values, loss, outputs = self._runner.evaluate(step, i, received)
            self._send_values(step, i, "E", values)
            yield loss, outputs

    def trial(self, step: int) -> Trial:
        """The first microbatch of `step` without codecs and with them, beside the step: nothing stays of it."""
        before = {n: self._runner.tensors[n].clone() for n, b in self._stage.buffers.items() if b.mutated}
        inputs = {n: self._take_tensor(step, 0, n, "F", None) for n in self._stage.inputs}
        gradients: list[dict[str, Tensor]] = []
        losses: list[float] = []
        for self._attempt in (RAW_TRIAL, CODED_TRIAL):
            received = {**self._exchange_shared(step, "F"), **inputs, **self._take_received(step, 0, "F")}
            loss = self._forward(step, 0, received)
            self._backward(step, 0, self._take_gradients(step, 0))
            losses += [] if loss is None else [float(loss)]
            gradients.append({n: p.grad for n, p in self._parameters.items() if p.grad is not None})
            for parameter in self._parameters.values():
                parameter.grad = None
            for name, tensor in before.items():
                self._runner.tensors[name].copy_(tensor)
        self._attempt = 0
        for name, tensor in inputs.items():  # the step needs them, too
            self._mailbox.put(FrameKey(self._epoch, step, 0, name, "F"), tensor)
        raw, coded = gradients
        difference = {n: coded[n] - raw[n] for n in raw if n in coded}
        return Trial(step, self._stage.index, _energy(raw), _energy(coded), _energy(difference), tuple(losses))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The optimizer's state (`optimizer/<key>/<parameter>`), before the first step."""
        if self._optimizer is not None:
            optim.load_state_tensors(self._optimizer, self._parameters, tensors)

    def state(self) -> dict[str, Tensor]:
        """Live views of what a checkpoint keeps: owned parameters, persistent buffers, optimizer state."""
        stage = self._stage
        kept = [n for n in stage.parameters if n not in stage.copies]
        kept += [n for n, b in stage.buffers.items() if b.persistent and n not in stage.copies]
        found = {name: self._runner.tensors[name].detach() for name in kept}
        if self._optimizer is not None:
            found |= optim.state_tensors(self._optimizer, self._parameters)
        return found

    def everything(self) -> dict[str, Tensor]:
        """All that another stage needs to go on from here: parameters and buffers, copies too, and optimizer state."""
        stage = self._stage
        found = {name: self._runner.tensors[name].detach() for name in (*stage.parameters, *stage.buffers)}
        if self._optimizer is not None:
            found |= optim.state_tensors(self._optimizer, self._parameters)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last commit, as the optimizer saw them (clipped), until the next step."""
        return self._gradients

    def _forward(self, step: int, microbatch: int, received: Mapping[str, Tensor]) -> Tensor | None:
        values, loss = self._runner.forward(step, microbatch, received)
        self._send_values(step, microbatch, "F", values)
        return loss

    def _backward(self, step: int, microbatch: int, grads: Mapping[str, Tensor | None]) -> None:
        passed = self._runner.backward(microbatch, grads)
        for receive in self._stage.receives:
            if receive.grad:
                key = FrameKey(self._epoch, step, microbatch, receive.value, "B", self._attempt)
                self._send([receive.grad_to], key, passed[receive.value])

    def _send_values(self, step: int, microbatch: int, direction: Direction, values: Mapping[str, Tensor]) -> None:
        for send in self._stage.sends:
            if not send.once:
                key = FrameKey(self._epoch, step, microbatch, send.value, direction, self._attempt)
                self._send(list(send.to), key, values[send.value])

    def _exchange_shared(self, step: int, direction: Direction) -> dict[str, Tensor]:
        """Parameters shared by several stages: sent by the owner, received by the others, once a step."""
        for send in self._stage.sends:
            if send.once:
                key = FrameKey(self._epoch, step, ONCE, send.value, direction, self._attempt)
                self._send(list(send.to), key, self._runner.tensors[send.value].detach())
        return {
            r.value: self._take_tensor(step, ONCE, r.value, direction, r.source) for r in self._stage.receives if r.once
        }

    def _take_values(self, step: int, microbatch: int, direction: Direction) -> dict[str, Tensor]:
        found = {n: self._take_tensor(step, microbatch, n, direction, None) for n in self._stage.inputs}
        return found | self._take_received(step, microbatch, direction)

    def _take_received(self, step: int, microbatch: int, direction: Direction) -> dict[str, Tensor]:
        return {
            r.value: self._take_tensor(step, microbatch, r.value, direction, r.source)
            for r in self._stage.receives
            if not r.once
        }

    def _take_gradients(self, step: int, microbatch: int) -> dict[str, Tensor | None]:
        return {
            name: self._take(step, microbatch, name, "B", source) for name, source in self._stage.grads_from.items()
        }

    def _take_tensor(self, step: int, microbatch: int, value: str, direction: Direction, source: int | None) -> Tensor:
        tensor = self._take(step, microbatch, value, direction, source)
        if tensor is None:
            raise Aborted(f"{value} of microbatch {microbatch} was announced as absent, which only gradients may be")
        return tensor

    def _take(self, step: int, microbatch: int, value: str, direction: Direction, source: int | None) -> Tensor | None:
        what = {"F": value, "B": f"the gradient of {value}", "E": f"{value} (evaluation)"}[direction]
        where = COORDINATOR if source is None else f"stage {source}"
        start = self._clock()
        attempt = 0 if source is None else self._attempt
        key = FrameKey(self._epoch, step, microbatch, value, direction, attempt)
        tensor = self._mailbox.take(key, f"{what} from {where}")
        self._note("wait", f"{what} from {where}", start)
        return tensor

    def _compute(self, label: str, work: Callable[[], T]) -> T:
        start = self._clock()
        result = work()
        if self._device.type == "cuda" and self.duty < 1:
            torch.cuda.synchronize(self._device)
        self._note("compute", label, start)
        if self.duty < 1:
            rest = self._clock()
            time.sleep((rest - start) * (1 / self.duty - 1))
            self._note("rest", label, rest)
        return result

    def _note(self, activity: str, label: str, start: float) -> None:
        end = self._clock()
        if end - start >= _SHORTEST_SPAN_S:
            self._spans.append(Span(activity, label, start - self._start_s, end - self._start_s))

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        grads = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        if not grads:
            return {}
        norms = torch.stack([torch.linalg.vector_norm(g).to(torch.float32) for g in grads.values()])
        return dict(zip(grads, norms.tolist(), strict=True))


def _energy(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2 for tensor in tensors.values())


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # `ru_maxrss` begins with the memory of the process that started this one
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
