"""The compute thread of a peer: builds one epoch's stage, then carries out instructions in order. I/O.

The event loop never waits for it, and it waits for the loop only where the run does: for inputs, activations
and gradients (inside the executor), for weights at the start, and at a commit for the upload of the state that
the commit is about to change.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import protocol
from .base import ONCE, Action, FrameKey
from .coding import Codecs
from .config import TrainConfig
from .errors import GeotrainError, RemoteProtocolError
from .executor import Aborted, Mailbox, StageWorker
from .graph import StageGraph
from .graph.deferred import materialize
from .graph.ir import Parameter
from .graph.ops import to_dtype
from .optim import state_names
from .transfers import state_spec_problem

_FINISH_S = 60.0
"""A stage that is asked to end has only commits to carry out."""

Held = dict[str, dict[str, Tensor | None]]
"""A stage's state: by parameter or buffer, itself and what the optimizer keeps for it (None: nothing yet)."""

Send = Callable[[list[int], FrameKey, Tensor | None], None]


class Loop(Protocol):
    """What the thread asks of the event loop. `fetch` and `upload` start at once and end in the future; `fetch` gives
    the bytes that came from other peers."""

    def post(self, message: protocol.FromPeer) -> None: ...
    def use_codecs(self, codecs: Codecs) -> None: ...
    def fetch(
        self, epoch: int, into: Mapping[str, Tensor], digests: Mapping[str, str], holders: Sequence[protocol.Holder]
    ) -> "concurrent.futures.Future[int]": ...
    def upload(
        self, epoch: int, stage: int, step: int, gradients: bool, tensors: Mapping[str, Tensor]
    ) -> "concurrent.futures.Future[None]": ...


@dataclass(slots=True)
class Machine:
    """How this machine computes."""

    device: torch.device
    duty: float
    threads: int | None


class StageThread:
    """One stage of one epoch, from its weights to its end. `worker` is None until the stage is built. `kept` is what
    this machine has of the state that the stage takes over, by name."""

    def __init__(
        self,
        prepare: protocol.Prepare,
        stage: StageGraph,
        train: TrainConfig,
        machine: Machine,
        send: Send,
        loop: Loop,
        kept: Held,
    ) -> None:
        self.epoch, self.step, self.index = prepare.epoch, prepare.step, prepare.stage
        self.stage = stage
        self.train = train
        self.worker: StageWorker | None = None
        self._prepare, self._machine, self._send, self._loop = prepare, machine, send, loop
        self._name, self._kept = prepare.names[prepare.stage], dict(kept)
        self._given: dict[str, str] = {}
        self._moved = Mailbox()
        self._following = tuple(
            move for move in prepare.moves if _parts(move.name, stage.parameters.get(move.name), train)[1:]
        )
        self._instructions: queue.SimpleQueue[protocol.Instruction | None] = queue.SimpleQueue()
        self._transfer: concurrent.futures.Future[int] | None = None
        self._upload: concurrent.futures.Future[None] | None = None
        self._stopped = threading.Event()
        self._doing = "loading weights"
        self._thread = threading.Thread(target=self._main, name=f"epoch-{self.epoch}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def instruct(self, instructions: Sequence[protocol.Instruction]) -> None:
        for instruction in instructions:
            self._instructions.put(instruction)

    def abort(self) -> None:
        """The epoch is over: whatever the thread does or waits for, it ends soon."""
        self._stopped.set()
        self._instructions.put(None)
        for transfer in (self._transfer, self._upload):
            if transfer is not None:
                transfer.cancel()
        self._moved.abort()
        if self.worker is not None:
            self.worker.abort()

    def join(self) -> None:
        self._thread.join()

    def finish(self) -> Held:
        """Carry out what is queued, then end; returns the stage's whole state."""
        self._instructions.put(None)
        self._thread.join(_FINISH_S)
        if self._thread.is_alive() or self.worker is None or self._following:
            self.abort()
            self._thread.join()
            raise RemoteProtocolError("the stage is asked to move while it works")
        everything, parameters = self.worker.everything(), self.stage.parameters
        return {
            name: {part: everything.get(part) for part in _parts(name, parameters.get(name), self.train)}
            for name in (*parameters, *self.stage.buffers)
        }

    def awaits(self, name: str) -> bool:
        """Whether state of a stage before is still to come from this peer."""
        moves = self._prepare.moves if self.worker is None else self._following
        return any(move.src == name for move in moves)

    def put(self, key: FrameKey, tensor: Tensor | None) -> None:
        """What arrived for the stage, from any thread."""
        if key.direction == "M":
            self._moved.put(key, tensor)
        elif self.worker is not None:
            self.worker.put(key, tensor)

    @property
    def doing(self) -> str:
        """A phrase for people: what the stage does or waits for."""
        waiting = self.worker.waiting_for if self.worker is not None else None
        return f"waiting for {waiting}" if waiting else self._doing

    def _main(self) -> None:
        try:
            if self._machine.threads is not None:
                torch.set_num_threads(self._machine.threads)  # OpenMP keeps this count for each thread
            shared_bytes = self._build()
            self._loop.post(protocol.Loaded(self.epoch, self.index, shared_bytes))
            self._doing = "waiting for the other stages"
            while (instruction := self._instructions.get()) is not None:
                self._carry_out(instruction)
        except (Aborted, concurrent.futures.CancelledError):
            return
        except Exception as error:
            if not self._stopped.is_set():
                self._loop.post(protocol.Failed(self.epoch, one_line(error)))

    def _build(self) -> int:
        """Returns the bytes of its weights that came from other peers."""
        prepare, stage, device = self._prepare, self.stage, self._machine.device
        wanted = {tensor.name: tensor.spec for tensor in prepare.fetch}
        fetched: dict[str, Tensor] = {}
        for name, spec in wanted.items():
            problem = state_spec_problem(stage, name, spec)
            if problem is not None:
                raise RemoteProtocolError(f"the coordinator wants {name!r} loaded, but {problem}")
            fetched[name] = torch.empty(spec.shape, dtype=to_dtype(spec.dtype))
        self._given = {tensor.name: tensor.digest for tensor in prepare.fetch if tensor.digest}
        kept = {name: self._kept[name][name] for name in self._given if name in self._kept}
        for name, tensor in kept.items():
            if tensor is not None:
                fetched[name] = tensor
        missing = {name: tensor for name, tensor in fetched.items() if kept.get(name) is None}
        self._transfer = self._loop.fetch(self.epoch, missing, self._given, prepare.holders)
        tensors: dict[str, Tensor] = {}
        moving = {move.name for move in prepare.moves}
        for name, entry in {**stage.parameters, **stage.buffers}.items():
            if name not in fetched and name not in moving:
                if entry.init is None:
                    raise RemoteProtocolError(f"nothing says what {name!r} holds")
                tensors[name] = materialize(entry.init, entry.spec, name, prepare.seed, device)
                if self._stopped.is_set():
                    raise Aborted
        tensors |= self._take_over()
        shared_bytes = self._transfer.result()
        entries = {**stage.parameters, **stage.buffers}
        for name in [name for name in fetched if name in entries]:
            tensors[name] = _laid_out(fetched.pop(name), entries[name].spec.stride).to(device)
        actions = [Action.parse(word) for word in prepare.actions]
        self.worker = StageWorker(
            stage, tensors, self.train, actions, epoch=self.epoch, device=device, seed=prepare.seed,
            send=self._send, duty=self._machine.duty, recompute=prepare.recompute,
        )  # fmt: skip
        self.worker.load(fetched)
        own = [move.name for move in self._following if move.src == self._name]
        self._kept = {name: self._kept[name] for name in own if name in self._kept}
        return shared_bytes

    def _take_over(self) -> dict[str, Tensor]:
        """The parameters and buffers that move here, on the device."""
        tensors: dict[str, Tensor] = {}
        for move in self._prepare.moves:
            tensor = self._moving(move, move.name)
            if tensor is None:
                raise RemoteProtocolError(f"{move.name!r} is to move here, and there is none")
            tensors[move.name] = tensor.to(self._machine.device)
        return tensors

    def _follow(self) -> None:
        """What the optimizer has kept of the parameters that moved here. It follows while the first step is computed,
        and is needed when that is applied."""
        if self._following and self.worker is not None:
            self._doing = "waiting for the optimizer's state"
            found: dict[str, Tensor] = {}
            for move in self._following:
                _, *states = _parts(move.name, self.stage.parameters.get(move.name), self.train)
                found |= {part: tensor for part in states if (tensor := self._moving(move, part)) is not None}
            self.worker.load(found)
            self._kept, self._following = {}, ()

    def _moving(self, move: protocol.Move, part: str) -> Tensor | None:
        """A part of what moves here, from this machine or another."""
        if move.src == self._name:
            return self._kept.get(move.name, {}).get(part)
        return self._moved.take(FrameKey(self.epoch, self._prepare.step, ONCE, part, "M"), f"{part} from {move.src}")

    def _carry_out(self, instruction: protocol.Instruction) -> None:
        worker = self.worker
        assert worker is not None
        match instruction:
            case protocol.Train(step):
                self.step, self._doing = step, "computing"
                report = worker.train(step)
                self._doing = "waiting for the commit"
                self._loop.post(protocol.Ready(self.epoch, report))
            case protocol.Try(step):
                self._doing = "trying the codecs"
                self._loop.post(protocol.Tried(self.epoch, worker.trial(step)))
            case protocol.Codecs(forward, backward):
                self._loop.use_codecs(Codecs(forward[self.index], backward[self.index]))
            case protocol.Commit(step, clip, lr, skip):
                self._settle()
                self._follow()
                worker.commit(step, clip, lr, skip)
                self.step = step + 1
            case protocol.Evaluate(step, count):
                self._doing = "evaluating"
                losses = worker.evaluate(step, count)
                if losses:
                    self._loop.post(protocol.Scored(self.epoch, step, tuple(losses)))
            case protocol.Continue(step, places):
                self._doing = "continuing texts"
                tokens = worker.successors(step, places)
                if tokens:
                    self._loop.post(protocol.Continued(self.epoch, step, tuple(tokens)))
            case protocol.Checkpoint(step):
                changing = {name for name, buffer in self.stage.buffers.items() if buffer.mutated}
                state = {n: t for n, t in worker.state().items() if n not in self._given}
                state |= {n: t.clone() for n, t in state.items() if n in changing}
                self._settle()
                self._upload = self._loop.upload(self.epoch, self.index, step, False, state)
                self._doing = "waiting for instructions"
            case protocol.Gradients(step):
                self._settle()
                self._upload = self._loop.upload(self.epoch, self.index, step, True, worker.gradients())

    def _settle(self) -> None:
        """Wait for the upload that is on its way."""
        if self._upload is not None:
            self._doing = "waiting for the upload of its weights"
            self._upload.result()
            self._upload = None


def _parts(name: str, parameter: Parameter | None, train: TrainConfig) -> list[str]:
    """A parameter or buffer, and what an optimizer may keep for it."""
    return [name, *(state_names(train, name) if parameter is not None and parameter.requires_grad else ())]


def _laid_out(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """The tensor in the memory layout that its graph was captured with."""
    if stride is None:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def one_line(error: Exception) -> str:
    """What the user is told of an error."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, GeotrainError) else f"{type(error).__name__}: {text}"
