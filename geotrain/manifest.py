"""The manifest of a checkpoint: which files it has, their hashes, and which tensors are in which. Pure."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import CheckpointError

OPTIMIZER = "optimizer/"
"""Optimizer state is named `optimizer/<state key>/<parameter>`, as in `optimizer/exp_avg/h.0.w`."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.safetensors$")]


class ManifestFile(BaseModel):
    """One safetensors file: its sha256, its size, and the names of its tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sha256: Sha256
    nbytes: Annotated[int, Field(ge=10)]
    tensors: tuple[str, ...]


class Manifest(BaseModel):
    """What a checkpoint is and is made of. It is written last: a folder without one is not a checkpoint.

    `step` is the number of committed steps. `graph_hash` and `config_digest` say what it can be resumed with.
    `ties` maps the other names of shared parameters to the name each is kept under. `transient` names buffers
    that resuming needs but the state dict lacks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: str
    step: Annotated[int, Field(ge=0)]
    seed: int
    graph_hash: str
    config_digest: str
    files: dict[FileName, ManifestFile]
    ties: dict[str, str] = {}
    transient: tuple[str, ...] = ()
    version: Annotated[int, Field(ge=1, le=1)] = 1

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        names = [name for file in self.files.values() for name in file.tensors]
        known = set(names)
        if len(known) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"tensor {twice!r} is in two places")
        for alias, name in self.ties.items():
            if alias in known or name not in known:
                raise ValueError(f"{alias!r} is tied to {name!r}, which does not fit the tensors")
        for name in self.transient:
            if name not in known:
                raise ValueError(f"transient tensor {name!r} is in no file")
        return self

    @property
    def state_dict_names(self) -> tuple[str, ...]:
        """Parameters and persistent buffers: what an export holds."""
        hidden = set(self.transient)
        names = (name for file in self.files.values() for name in file.tensors)
        return tuple(n for n in names if not n.startswith(OPTIMIZER) and n not in hidden)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """The inverse of `to_json`. Raises `CheckpointError` with the first thing that is wrong."""
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            reason = first["msg"].removeprefix("Value error, ")
            raise CheckpointError(
                f"this is not a checkpoint manifest: {where + ': ' if where else ''}{reason}"
            ) from None
