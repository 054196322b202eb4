"""What a run does, told to TensorBoard and Weights & Biases: give one to `Trainer(callbacks=[...])`. I/O."""

import os
from typing import Any

from . import events
from .errors import UserError


class TensorBoard:
    """Writes losses, gradient norms, learning rates and speed to `folder`, for `tensorboard --logdir folder`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError('TensorBoard is not here; run `pip install "geotrain[tensorboard]"`') from None
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def __call__(self, event: events.RunEvent) -> None:
        step, numbers = _numbers(event)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        if isinstance(event, events.Ended):
            self._writer.close()


class Wandb:
    """Logs the same to Weights & Biases; `options` are those of `wandb.init`."""

    def __init__(self, **options: Any) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise UserError('Weights & Biases is not here; run `pip install "geotrain[wandb]"`') from None
        self._run: Any = wandb.init(**options)

    def __call__(self, event: events.RunEvent) -> None:
        step, numbers = _numbers(event)
        if numbers:
            self._run.log(numbers, step=step)
        if isinstance(event, events.Ended):
            self._run.finish()


def _numbers(event: events.RunEvent) -> tuple[int, dict[str, float]]:
    match event:
        case events.StepCommitted():
            return event.step, {
                "train/loss": event.loss, "train/grad_norm": event.grad_norm, "train/learning_rate": event.lr,
                "train/seconds_per_step": event.seconds,
                "train/tokens_per_second": event.tokens / max(event.seconds, 1e-9),
            }  # fmt: skip
        case events.Evaluated(step, loss):
            return step, {"eval/loss": loss}
        case _:
            return 0, {}
