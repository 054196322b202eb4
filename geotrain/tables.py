"""TOML tables as closed pydantic models, and what is wrong with one in one line. Pure.

`parse` reads text (TOML, or the JSON that a run keeps), finds the model of each table, and turns pydantic's
complaints into ours: which key of which table, what it got, what is allowed, and the nearest known key.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, ValidationError

from .errors import ConfigError


class Section(BaseModel):
    """A table of a TOML file: typed, closed, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def like(pattern: str, what: str) -> AfterValidator:
    """A string of a form that a user reads in words."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"should be {what}")
        return value

    return AfterValidator(check)


def kind_or(default: str) -> Discriminator:
    """Chooses the section's class by its `kind`."""

    def read(value: Any) -> Any:
        return cast(Any, value).get("kind", default) if isinstance(value, dict) else getattr(value, "kind", default)

    return Discriminator(read)


S = TypeVar("S", bound=Section)


def parse(kind: type[S], text: str, source: str, folder: Path | None) -> S:
    try:
        values = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        # JSON mode: strict types, but lists where a TOML file cannot say tuple. A TOML date becomes a string.
        typed = json.dumps(values, default=str)
    except ValueError as error:
        raise ConfigError(f"{source}: malformed: {str(error)[:200]}; correct that line") from None
    except RecursionError:
        raise ConfigError(f"{source}: malformed: brackets are nested too deep; remove some") from None
    try:
        return kind.model_validate_json(typed, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(kind, error)}") from None


def _explain(kind: type[Section], error: ValidationError) -> str:
    """The first complaint, in our words: which key, what it got, what is allowed."""
    first = error.errors()[0]
    section, key = _locate(kind, first["loc"])
    where = f"[{section[0]}] " if section[0] else ""
    if section[0] and isinstance(first["loc"][1], int):
        where = f"[[{section[0]}]] number {first['loc'][1] + 1}: "
    value = repr(first["input"])[:60]
    match first["type"]:
        case "extra_forbidden":
            return _unknown(kind, section, key)
        case "missing" if len(first["loc"]) and isinstance(first["loc"][-1], int):
            return f"{where}{key} = {value} has too few items"
        case "missing":
            return f"{where}{key} is missing; add it"
        case "union_tag_invalid":
            allowed = ", ".join(name for path, name, _ in _sections(kind) if path == key)
            return f"[{key}] kind = {first['input'].get('kind')!r} is none of {allowed}"
        case "model_type" | "model_attributes_type":
            name = key or section[0]
            return f"{name} must be a table; write [{name}] and its keys below"
        case "value_error":
            rule = first["msg"].removeprefix("Value error, ")
            return f"{where}{key} = {value} {rule}" if key else f"{where}{rule}"
        case _:
            rule = first["msg"].removeprefix("Input ").removeprefix("Tuple ")
            return f"{where}{key} = {value} {rule}"


def _locate(kind: type[Section], loc: tuple[int | str, ...]) -> tuple[tuple[str, str], str]:
    """((section, its kind), key) of a complaint. An array of tables is a section with a number."""
    parts = [str(p) for i, p in enumerate(loc) if i != 1 or not isinstance(p, int)]
    names = {(path, name) for path, name, _ in _sections(kind)}
    if len(parts) > 2 and (parts[0], parts[1]) in names:
        return (parts[0], parts[1]), parts[2]
    if len(parts) > 1 and (parts[0], "") in names:
        return (parts[0], ""), parts[1]
    if len(parts) == 2 and (parts[0], parts[1]) in names:  # the section as a whole
        return (parts[0], parts[1]), ""
    return ("", ""), parts[0] if parts else ""


def _sections(kind: type[Section]) -> Iterator[tuple[str, str, type[Section]]]:
    """(section, kind or "", class) of every table that may stand in the file."""
    for path, field in kind.model_fields.items():
        for cls in _classes(field.annotation):
            tag = cls.model_fields.get("kind")
            yield path, get_args(tag.annotation)[0] if tag else "", cls


def _classes(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _classes(inner)


def _unknown(kind: type[Section], section: tuple[str, str], key: str) -> str:
    homes = {(path, name): cls for path, name, cls in _sections(kind)} | {("", ""): kind}
    known = list(homes[section].model_fields)
    where = f" in [{section[0]}]" if section[0] else ""
    if section[1]:
        where += f" of kind {section[1]!r}"
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    owners = [home for home, cls in homes.items() if home[0] and key in cls.model_fields]
    kinds = [name for path, name in owners if path == section[0]]
    if kinds:
        hint = f"it goes with kind = {' or '.join(repr(name) for name in kinds)}"
    elif owners:
        hint = f"it belongs in [{owners[0][0]}]"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"known are {', '.join(known)}"
    return f"unknown key {key!r}{where}; {hint}"
