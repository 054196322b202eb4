"""The Python API: a module and data in, trained weights out, over peer processes. I/O.

    result = geotrain.Trainer(model, train_dataset=batches, peers=4, lr=1e-3).train()
    model.load_state_dict(result.state_dict)

or, as the Trainer of Hugging Face, with its `TrainingArguments` and datasets of samples:

    geotrain.Trainer(model, args, train_dataset, eval_dataset, peers=4).train()

What comes back equals, to the last bit, this loop in one process with one thread (and fp32, and peers of one kind):

    for step, batch in enumerate(batches):
        for i, part in enumerate(split(batch, microbatches)):
            with geotrain.seeded(seed, step, i):  # dropout
                loss = model(**part)
            (loss / microbatches).backward()
        clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()

Where labels are masked (-100), `loss` is multiplied by the microbatch's weight, see `geotrain.graph.weigh`: the loss of
a step is the mean over all labels that count.
"""

import asyncio
import contextlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor, nn

from . import events
from .base import Plan
from .config import JobConfig, parse_job
from .coordinator import Coordinator
from .data import Batch, BatchSource, FunctionSource, Inputs, Source
from .errors import DataError, UserError
from .facts import Recorder
from .graph import OpGraph, capture
from .graph.capture import name_inputs
from .graph.deferred import programs
from .identity import Ticket
from .jobs import save_weights, weigh
from .local import LocalPeer, LocalPeers, train_with
from .results import Result
from .rows import Collate, Dataset, RowSource, read_arguments
from .runfolder import refuse_used
from .trained import WEIGHTS
from .weights import WeightStore, save_module

DataFunction = Callable[[int, int], Mapping[str, Tensor] | Sequence[Tensor]]
Loss = Callable[[Any, Tensor], Tensor]

_RUN = "trainer"
"""What a run is called in its ledger."""

_PREFIX = "model."
"""Where the user's module is inside `_WithLoss`."""


@dataclass(frozen=True)
class TrainResult:
    """What training gave.

    `losses`: mean loss of each step. `microbatch_losses`: those of its microbatches, by step. `held_out`: held-out
    loss by number of steps done. `run_dir`: checkpoint, plan, ledger and events of the run.
    """

    losses: list[float]
    microbatch_losses: list[list[float]]
    held_out: dict[int, float]
    run_dir: Path
    reason: str
    _result: Result
    _prefix: str = ""

    @cached_property
    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers after the last step, on the CPU, by the names of the model's state dict.
        Raises `CheckpointError` if the run ended before anything was saved."""
        return self._stripped(self._result.state_dict())

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients by parameter name, as the optimizer saw them: of the mean loss over microbatches,
        after clipping. Needs `keep_gradients`; raises `CheckpointError` without."""
        return self._stripped(self._result.gradients())

    def _stripped(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n.removeprefix(self._prefix): t for n, t in tensors.items() if n.startswith(self._prefix)}


class Trainer:
    """Trains a module over peers.

    Args:
        model: any module whose forward returns its loss: a scalar, `(loss, ...)`, or an output with `.loss`. It runs in
            the mode (train or eval) that it is in. It is read, never changed. On the meta device (built with
            `geotrain.graph.deferred.record`) peers make the weights themselves.
        args: a `transformers.TrainingArguments`, or anything with its fields. The datasets then hold samples, they are
            shuffled and collated as these say, what they say replaces our keywords of the same meaning, and `train`
            also loads the trained weights into `model`.
        train_dataset: without `args`, a list of batches, each for a whole step: a mapping of tensors by the names of
            forward's parameters, or a sequence of them in that order, `[microbatches * n, ...]` each; they are split
            along the first dimension. Or a function of (step, microbatch) that gives a microbatch and, asked again, an
            equal one.
        eval_dataset: batches, or samples, to evaluate on before the first and after the last step.
        data_collator: with `args`, makes a microbatch of a list of samples, always of the same shapes; by default
            samples are stacked, and filled up to the longest of the dataset.
        evaluate_every: steps between evaluations; 0: only first and last.
        loss: for a module whose forward gives no loss: a function of (forward's output, target). The target is the
            last tensor of a sequence, or the one of a mapping that forward does not take.
        steps: by default one for each batch; more go round again.
        microbatches: microbatches a step; gradients are those of their mean loss.
        peers: processes to start on this machine, or to wait for, see `coordinator`.
        schedule: "1f1b" or "gpipe".
        max_loss_increase: how much higher, as a fraction, compression on slow links may leave the loss after equal
            steps; by default it is lossless, and the run equals one process to the last bit.
        plan: who runs what; by default made from what is measured. Its peers are called peer-0, peer-1, ...
        lr_schedule: "constant", "linear" or "cosine" after `warmup_steps`, down to `min_lr_fraction` of `lr`.
        autocast: "bfloat16" to compute in it where torch deems that safe.
        clip_norm: the gradients' global norm is clipped to this.
        seed: of dropout and fresh weights, see `geotrain.seeded`.
        keep_gradients: whether the result has the last step's gradients.
        coordinator: `host:port` to listen on for peers of other machines (`geotrain join TICKET`), instead of
            starting them here; `on_ticket` gets the ticket, by default it is printed.
        threads: compute threads of each local peer; more than one may change the last bits of a sum.
        device: of local peers: auto, cpu, cuda, ...
        run_dir: a folder without a run in it; by default a new one in `runs/`.
        callbacks: are told all that happens, on the training thread, see `geotrain.events`; `geotrain.callbacks` has
            those for TensorBoard and Weights & Biases.

    Raises:
        UserError: an argument is wrong, or the model cannot be captured; one line that says what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        train_dataset: Iterable[Batch] | Dataset | DataFunction = (),
        eval_dataset: Iterable[Batch] | Dataset | None = None,
        *,
        data_collator: Collate | None = None,
        evaluate_every: int = 0,
        loss: Loss | None = None,
        steps: int | None = None,
        microbatches: int = 4,
        peers: int = 2,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        max_loss_increase: float = 0.0,
        plan: Plan | None = None,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum: float = 0.0,
        lr_schedule: Literal["constant", "linear", "cosine"] = "constant",
        warmup_steps: int = 0,
        min_lr_fraction: float = 0.0,
        autocast: Literal["bfloat16"] | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        keep_gradients: bool = False,
        coordinator: str | None = None,
        on_ticket: Callable[[Ticket], None] | None = None,
        threads: int = 1,
        device: str = "auto",
        run_dir: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callable[[events.RunEvent], None]] = (),
    ) -> None:
        self._model, self._in_place = model, args is not None
        self._module = model if loss is None else _WithLoss(model, loss)
        self._prefix = "" if loss is None else _PREFIX
        train: dict[str, Any] = {
            "steps": steps, "microbatches": microbatches, "lr": lr, "betas": betas, "eps": eps,
            "weight_decay": weight_decay, "clip_norm": clip_norm or 0.0, "lr_schedule": lr_schedule,
            "warmup_steps": warmup_steps, "min_lr_fraction": min_lr_fraction, "autocast": autocast,
        }  # fmt: skip
        batches: int | None = None
        self._source: Source
        if args is None:
            held_out = list(cast("Iterable[Batch]", eval_dataset or ()))
            self._source, batches = _open(self._module, train_dataset, held_out, microbatches)
        else:
            rows, unseen = cast(Dataset, train_dataset), cast("Dataset | None", eval_dataset)
            train |= read_arguments(args, len(rows))
            seed, evaluate_every = train.pop("seed"), train.pop("evaluate_every")
            self._source = RowSource(
                rows, unseen, data_collator, seed=seed, microbatches=train["microbatches"],
                size=train["microbatch_size"],
            )  # fmt: skip
        steps = train["steps"]
        if not (steps or batches):
            raise UserError("data given by a function has no end; give steps")
        train["steps"] = steps or batches
        folder = Path(run_dir) if run_dir is not None else Path("runs") / f"trainer-{time.strftime('%Y%m%d-%H%M%S')}"
        self.run_dir = _unused(folder) if run_dir is None else folder
        refuse_used(self.run_dir, _RUN)
        count = len(plan.stages) if plan is not None else peers
        self._job = _job(
            run={"name": _RUN, "seed": seed},
            train={"optimizer": optimizer, "momentum": momentum, **train},
            pipeline={"peers": count, "stages": count, "schedule": schedule},
            compression={"max_loss_increase": max_loss_increase},
            evaluate={"microbatches": self._source.held_out_microbatches, "every": evaluate_every},
        )  # fmt: skip
        self._plan, self._keep_gradients = plan, keep_gradients
        self._local, self._address = coordinator is None, coordinator or "127.0.0.1:0"
        if not self._address.rpartition(":")[2].isdigit():
            raise UserError(f"coordinator={coordinator!r} is not an address to listen on; write host:port")
        self._on_ticket = on_ticket or _print_ticket
        self._threads, self._device = threads, device
        self._callbacks = tuple(callbacks)
        self.graph, self._weights = self._capture()

    def train(self) -> TrainResult:
        """Trains to the last step. Works inside a running event loop too, which it blocks.

        Raises `UserError` if the run cannot go on, and `KeyboardInterrupt` on Ctrl+C, after the peers are gone.
        """
        recorder = Recorder()
        steps: dict[int, list[float]] = {}

        def on_event(event: events.RunEvent) -> None:
            recorder(event)
            if isinstance(event, events.StepCommitted):
                steps[event.step] = list(event.losses)
            for callback in self._callbacks:
                callback(event)

        result = _in_thread(self._run(recorder, on_event))
        reason = recorder.ended.reason if recorder.ended is not None else "unknown"
        microbatch_losses = [steps[step] for step in sorted(steps)]
        trained = TrainResult(
            result.losses, microbatch_losses, result.held_out, self.run_dir, reason, result, self._prefix
        )
        if self._in_place:
            self._model.load_state_dict(trained.state_dict)
        return trained

    def save_model(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model as it is now, with its configuration if it has one (`save_pretrained`)."""
        save = getattr(self._model, "save_pretrained", None)
        if callable(save):
            save(folder)
        else:
            save_module(self._model, folder)

    async def _run(self, recorder: Recorder, on_event: Callable[[events.RunEvent], None]) -> Result:
        host, _, port = self._address.rpartition(":")
        coordinator = Coordinator(
            self._job, graph=self.graph, source=self._source, run_dir=self.run_dir, weights=self._weights,
            on_event=on_event, host=host, port=int(port), plan=self._plan, keep_gradients=self._keep_gradients,
        )  # fmt: skip
        if not self._local:
            self._on_ticket(await coordinator.start())
            return await coordinator.run()
        names = [f"peer-{i}" for i in range(self._job.pipeline.peers)]
        if self._plan is not None:
            names = [stage.peer for stage in self._plan.stages]
        peers = [LocalPeer(name, threads=self._threads, device=self._device) for name in names]
        with LocalPeers(peers, self.run_dir / "logs") as processes:
            ticket = await coordinator.start()
            return await train_with(coordinator, processes, recorder)(ticket)

    def _capture(self) -> tuple[OpGraph, WeightStore | None]:
        inputs = self._source.train(0, 0)
        weights: WeightStore | None = None
        fresh = any(tensor.is_meta for tensor in self._module.parameters())
        init = programs(self._module) if fresh else None
        graph = capture(self._module, inputs, autocast=self._job.train.autocast, init=init)
        if not fresh:
            weights = save_weights(self._module, graph, self.run_dir / WEIGHTS)
        graph, self._source, _ = weigh(graph, self._source, self._job)
        return graph, weights


class _WithLoss(nn.Module):
    """A module and a loss function as one module that ends in its loss."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.train(model.training)

    def forward(self, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        taken = _parameters(self.model)
        targets = [name for name in inputs if name not in taken]
        if len(targets) != 1:
            raise DataError(
                f"with a loss function a batch holds what forward takes ({', '.join(taken)}) and one target, not "
                f"{', '.join(inputs)}"
            )
        output = self.model(**{name: tensor for name, tensor in inputs.items() if name in taken})
        return self.loss(output, inputs[targets[0]]), {}


def _parameters(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]


def _named(module: nn.Module, batch: Any) -> Inputs:
    """A batch or microbatch by name. With a loss function, a sequence's last tensor is its target."""
    if isinstance(batch, Mapping):
        return dict(cast(Mapping[str, Tensor], batch))
    tensors = [batch] if isinstance(batch, Tensor) else list(batch)
    if isinstance(module, _WithLoss):
        if len(tensors) < 2:
            raise DataError("with a loss function a batch holds forward's inputs and the target")
        return {**name_inputs(module.model, tensors[:-1]), "target": tensors[-1]}
    return name_inputs(module, tensors)


def _open(module: nn.Module, data: Any, held_out: list[Batch], microbatches: int) -> tuple[Source, int | None]:
    """The data, and how many batches it has."""
    if callable(data) and not isinstance(data, Sequence):
        make = cast(DataFunction, data)
        return FunctionSource(lambda step, microbatch: _named(module, make(step, microbatch))), None
    batches = [_named(module, batch) for batch in data]
    source = BatchSource(batches, microbatches, held_out=[_named(module, batch) for batch in held_out])
    return source, len(batches)


def _job(**sections: Mapping[str, Any]) -> JobConfig:
    return parse_job(json.dumps({**sections, "model": {"kind": "module"}}), "Trainer")


def _unused(folder: Path) -> Path:
    """The folder, or the first of its numbered kin that is not there yet; it is made, so that it is ours."""
    number = 1
    while True:
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1


def _print_ticket(ticket: Ticket) -> None:
    print(f"geotrain join {ticket}", flush=True)


def _in_thread(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine on an event loop of its own, in a thread of its own, since the caller may be in a loop."""
    outcome: list[Result] = []
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()

    def main() -> None:
        asyncio.set_event_loop(loop)
        try:
            outcome.append(loop.run_until_complete(task))
        except BaseException as error:
            failure.append(error)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    task = loop.create_task(work)
    thread = threading.Thread(target=main, name="geotrain-trainer", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(15.0)
        raise
    if failure:
        raise failure[0]
    return outcome[0]
