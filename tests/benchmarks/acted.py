"""`geotrain join` of a peer that acts out a machine of a known speed, for swarms that share a few cores. I/O.

An action lasts as long as its FLOPs take at `SPEED` times the peer's duty cap, whatever this machine needs for it; what
it sends leaves then, and the peer says that it is so fast. A step is what peers of such speeds would take, while the
cores have time to spare.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from geotrain import executor, peer, stagethread
from geotrain.cli import main
from geotrain.opcost import backward_flops, op_flops

PROGRAM = ("-m", "tests.benchmarks.acted")
SPEED = 1e10
"""FLOP/s, as `opcost` counts them."""

T = TypeVar("T")


class Net(nn.Module):
    """What such peers train: equal residual layers."""

    def __init__(self, layers: int, width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self._activation = activation

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self._activation(layer(x))
        return ((x - y) ** 2).mean()


class Worker(executor.StageWorker):
    def __init__(self, stage: Any, *args: Any, **options: Any) -> None:
        super().__init__(stage, *args, **options)
        self._seconds = {
            kind: sum(flops(op, stage) for op in stage.ops) / SPEED
            for kind, flops in (("F", op_flops), ("B", backward_flops))
        }

    def _compute(self, label: str, work: Callable[[], T]) -> T:
        start, send, held = self._clock(), self._send, list[tuple[Any, ...]]()
        self._send = lambda *message: held.append(message)
        result = work()
        seconds = next((s for kind, s in self._seconds.items() if kind in label), 0.0)
        time.sleep(max(0.0, start + seconds / self.duty - self._clock()))
        self._send = send
        self._note("compute", label, start)
        for message in held:
            send(*message)
        return result


def _unmeasured(*_: object) -> tuple[float, tuple[()]]:
    """Blocks take what their FLOPs say."""
    return 0.0, ()


if __name__ == "__main__":
    stagethread.StageWorker = Worker  # pyright: ignore[reportPrivateImportUsage]
    peer.measured_flops_per_s = lambda *_: SPEED  # pyright: ignore[reportPrivateImportUsage]
    peer.measure = _unmeasured  # pyright: ignore[reportPrivateImportUsage]
    main()
