"""The README is the map: every module is on it, and what it names exists."""

import re
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_module_has_a_phrase():
    rows = set(re.findall(r"^\| `(geotrain/[\w/]+\.py)` \| \S+", README, re.MULTILINE))
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "geotrain").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert rows == modules


def test_every_path_exists():
    named = set(re.findall(r"`((?:geotrain|peers|tests|examples)/[\w/.]*)`", README))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_benchmarks_named_exist():
    named = re.findall(r"python -m tests\.benchmarks --only ([\w-]+)", README)
    assert named
    assert [name for name in named if name not in BENCHMARKS] == []
    assert [name for name in BENCHMARKS if not find_spec(f"tests.benchmarks.{name.replace('-', '_')}")] == []
