"""Manifests survive JSON, and broken ones are refused with the reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.errors import CheckpointError
from geotrain.manifest import Manifest, ManifestFile

NAMES = st.text("abc.01", min_size=1, max_size=12)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(NAMES, unique=True, max_size=12))
    cut = draw(st.integers(0, len(names)))
    sha = st.text("0123456789abcdef", min_size=64, max_size=64)
    files = {
        f"stage-{i:03d}.safetensors": ManifestFile(
            sha256=draw(sha), nbytes=draw(st.integers(10, 2**50)), tensors=tuple(part)
        )
        for i, part in enumerate((names[:cut], names[cut:]))
    }
    ties = {f"tied {name}": name for name in names[:2]}
    return Manifest(
        run=draw(st.text(max_size=20)), step=draw(st.integers(0, 2**40)), seed=draw(st.integers(-99, 2**60)),
        graph_hash="g", config_digest="c", files=files, ties=ties, transient=tuple(names[-2:]),
    )  # fmt: skip


@given(manifests())
def test_json_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest


GOOD = {
    "run": "r", "step": 3, "seed": 0, "graph_hash": "g", "config_digest": "c",
    "files": {
        "stage-000.safetensors": {"sha256": "0" * 64, "nbytes": 9999, "tensors": ["w", "m", "optimizer/a/w"]},
        "stage-001.safetensors": {"sha256": "1" * 64, "nbytes": 99, "tensors": ["v"]},
    },
    "ties": {"head": "w"}, "transient": ["m"],
}  # fmt: skip


def test_state_dict_names_leave_out_optimizer_and_transient() -> None:
    assert Manifest.from_json(json.dumps(GOOD)).state_dict_names == ("w", "v")


def _file(**changes: object) -> dict[str, object]:
    return {"sha256": "0" * 64, "nbytes": 99, "tensors": ["w"], **changes}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": -1}, "step"),
        ({"step": "3"}, "step"),
        ({"seed": 0.5}, "seed"),
        ({"colour": 1}, "colour"),
        ({"version": 2}, "version"),
        ({"files": None}, "files"),
        ({"files": {"../evil.safetensors": _file()}}, "files"),
        ({"files": {"a.pt": _file()}}, "files"),
        ({"files": {"a.safetensors": _file(sha256="zz")}}, "sha256"),
        ({"files": {"a.safetensors": _file(nbytes=-5)}}, "nbytes"),
        ({"files": {"a.safetensors": _file(tensors=["w", "w"])}}, "two places"),
        ({"files": {"a.safetensors": _file(), "b.safetensors": _file()}}, "two places"),
        ({"ties": {"head": "nothing"}}, "tied"),
        ({"ties": {"v": "w"}}, "tied"),
        ({"transient": ["nothing"]}, "in no file"),
    ],
)
def test_broken_manifests_are_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        Manifest.from_json(json.dumps({**GOOD, **change}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "{}", "[" * 100_000])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)
