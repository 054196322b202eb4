"""What all benchmarks rely on: runs that take turns, ratios within a round, tables, ratios that CI keeps."""

import io
import json

import pytest
from rich.console import Console

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks.tables import Table, alternate, ratio


def test_runs_take_turns_and_the_order_turns_round():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    assert alternate(2, runs) == {"a": [1, 6], "b": [2, 5], "c": [3, 4]}
    assert "".join(order) == "abccba"


def test_a_round_is_compared_with_itself():
    assert ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == 1.0


def test_a_table_as_text_and_as_facts():
    table = Table("speed", ("run", "s"), [("ours", 0.5), ("theirs", None)], ["a note"], {"ours over theirs": 0.25})
    text = io.StringIO()
    table.print(Console(file=text, width=100))
    assert all(word in text.getvalue() for word in ("speed", "ours", "0.5", "a note", "ours over theirs: 0.25"))
    assert json.loads(json.dumps(table.facts()))["rows"] == [{"run": "ours", "s": 0.5}, {"run": "theirs", "s": None}]


@pytest.mark.parametrize(
    ("ratios", "failed"), [((3.0,), 0), ((3.1, 2.9), 0), ((3.1, 3.2), 1)], ids=["within", "once over", "twice over"]
)
def test_a_ratio_that_stays_over_the_kept_one_fails(tmp_path, monkeypatch, ratios, failed):
    def command(*options, measured):
        left = list(measured)

        def run(*_):
            return [Table("speed", ("run",), [], [], {"x over y": left.pop(0), "new over old": 9.0})]

        monkeypatch.setattr(benchmarks, "_run", run)
        monkeypatch.setattr("sys.argv", ["benchmarks", "--short", "--only", "codecs", *options])
        code = benchmarks.main()
        assert not left
        return code

    monkeypatch.setattr(benchmarks, "KEPT", tmp_path / "kept.json")
    assert command("--keep", measured=[1.0]) == 0
    assert json.loads((tmp_path / "kept.json").read_text())["codecs: x over y"] == 3.0
    assert command(measured=ratios) == failed


@pytest.mark.parametrize(
    ("words", "says"), [(["--only", "nothing"], "invalid choice"), (["--json", "none/x.json"], "no folder none")]
)
def test_mistakes_are_told_before_anything_runs(monkeypatch, capsys, words, says):
    monkeypatch.setattr("sys.argv", ["benchmarks", *words])
    with pytest.raises(SystemExit):
        benchmarks.main()
    assert says in capsys.readouterr().err
