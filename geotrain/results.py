"""What a run leaves behind: losses, and its tensors on disk, read when asked for. I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from .checkpoint import open_checkpoint
from .errors import CheckpointError
from .weights import WeightStore


@dataclass
class Result:
    """`losses`: the mean loss of every step, from the first. `held_out`: by number of steps done.
    `checkpoint`: the newest one's folder. `base` has the `persistent` tensors that no checkpoint has; `ties` maps other
    names of tied parameters to the one they are kept under."""

    run_dir: Path
    losses: list[float] = field(default_factory=list[float])
    held_out: dict[int, float] = field(default_factory=dict[int, float])
    checkpoint: Path | None = None
    base: WeightStore | None = None
    persistent: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def gradients_dir(self) -> Path:
        return self.run_dir / "gradients"

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name, other names of tied parameters included.

        Raises `CheckpointError` if the run ended before anything was saved.
        """
        if self.checkpoint is None:
            raise CheckpointError(f"the run in {self.run_dir} has saved no weights; let it finish a step")
        checkpoint = open_checkpoint(self.checkpoint)
        with checkpoint.store as store:
            tensors = {name: store.load(name) for name in checkpoint.manifest.state_dict_names}
        if self.base is not None:
            with self.base.reopen() as store:
                tensors |= {n: store.load(n) for n in self.persistent if n not in tensors and n in store}
        return tensors | {alias: tensors[name] for alias, name in self.ties.items()}

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients by parameter name, as they were applied: clipped. Needs `keep_gradients`."""
        if not self.gradients_dir.is_dir():
            raise CheckpointError(f"the run in {self.run_dir} kept no gradients; ask with keep_gradients")
        with WeightStore(self.gradients_dir) as store:
            return {name: store.load(name) for name in store.names()}
