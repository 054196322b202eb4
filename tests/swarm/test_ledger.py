"""The ledger: one row a microbatch, one commit a step, and no half of either."""

import math
import multiprocessing
import os
import sqlite3

import pytest

from geotrain.errors import LocalError
from geotrain.ledger import Ledger
from geotrain.runstate import CommitRow


def row(step, epoch=1, loss=1.0):
    return CommitRow(step, epoch, loss, grad_norm=2.0, clip=0.5, lr=1e-3, skipped=False, seconds=0.1)


def fill(ledger, steps, epoch=1):
    for step in range(ledger.steps, steps):
        ledger.commit(row(step, epoch), [f"{step}/{i}" for i in range(3)], [1.0, 2.0, 3.0])


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", "run")
    yield ledger
    ledger.close()


def test_commits_come_back_after_reopening(ledger, tmp_path):
    fill(ledger, 4)
    again = Ledger(tmp_path / "ledger.sqlite", "run")
    assert again.steps == 4
    assert again.commits() == [row(step) for step in range(4)]
    assert again.losses(2) == [1.0, 2.0, 3.0]
    audit = again.audit(3)
    assert audit.ok and (audit.steps, audit.microbatches) == (4, 12)
    again.close()


def test_the_file_is_durable(ledger):
    assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_only_the_next_step_can_be_committed(ledger):
    fill(ledger, 2)
    for step in (1, 3):
        with pytest.raises(LocalError, match="ledger is at step 2"):
            ledger.commit(row(step), ["a"], [1.0])
    assert ledger.steps == 2 and ledger.audit(3).ok


def test_a_commit_is_all_or_nothing(ledger):
    ledger._db.execute("INSERT INTO microbatch VALUES ('run', 0, 2, 'x', 1.0)")
    with pytest.raises(LocalError, match="UNIQUE"):
        ledger.commit(row(0), ["a", "b", "c"], [1.0, 2.0, 3.0])
    assert ledger.steps == 0
    assert ledger.audit(3).stray == ((0, 2),)
    with pytest.raises(ValueError, match="zip"):
        ledger.commit(row(0), ["a"], [1.0, 2.0])
    assert ledger.audit(3).microbatches == 1


def test_a_skipped_step_keeps_its_nan(ledger):
    ledger.commit(CommitRow(0, 1, math.nan, math.inf, 1.0, 1e-3, True, 0.1), ["a", "b"], [math.nan, 1.0])
    (back,) = ledger.commits()
    assert math.isnan(back.loss) and back.grad_norm == math.inf and back.skipped
    assert math.isnan(ledger.losses(0)[0]) and ledger.losses(0)[1] == 1.0


def test_rolling_back_forgets_and_is_counted(ledger):
    fill(ledger, 5)
    assert ledger.roll_back(5, epoch=2) == 0
    assert ledger.roll_back(2, epoch=2) == 3
    assert ledger.steps == 2 and ledger.audit(3).ok
    fill(ledger, 6, epoch=2)
    assert ledger.rollbacks() == [(2, 5, 2)]
    assert [commit.epoch for commit in ledger.commits()] == [1, 1, 2, 2, 2, 2]
    assert ledger.audit(3).ok


def test_runs_share_a_file_without_mixing(ledger, tmp_path):
    fill(ledger, 3)
    other = Ledger(tmp_path / "ledger.sqlite", "other")
    fill(other, 1)
    other.roll_back(0, epoch=2)
    assert ledger.steps == 3 and other.steps == 0 and ledger.rollbacks() == []
    other.close()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("DELETE FROM microbatch WHERE step = 1 AND microbatch = 2", {"missing": ((1, 2),)}),
        ("INSERT INTO microbatch VALUES ('run', 1, 3, 'x', 1.0)", {"stray": ((1, 3),)}),
        ("DELETE FROM step_commit WHERE step = 1", {"gaps": (1,), "stray": ((1, 0), (1, 1), (1, 2))}),
    ],
)
def test_the_audit_finds_damage(ledger, damage, found):
    fill(ledger, 3)
    ledger._db.execute(damage)
    audit = ledger.audit(3)
    assert not audit.ok
    assert {
        name: getattr(audit, name) for name in ("missing", "doubled", "stray", "gaps") if getattr(audit, name)
    } == found


def test_the_audit_would_find_a_doubled_row(tmp_path):
    """The schema forbids doubled rows; a file whose schema does not still fails the audit."""
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("CREATE TABLE microbatch (run TEXT, step INTEGER, microbatch INTEGER, sample TEXT, loss REAL)")
    db.commit()
    ledger = Ledger(tmp_path / "ledger.sqlite", "run")
    fill(ledger, 1)
    ledger._db.execute("INSERT INTO microbatch SELECT * FROM microbatch WHERE microbatch = 1")
    assert ledger.audit(3).doubled == ((0, 1),)
    ledger.close()
    db.close()


def _die_between(path):
    ledger = Ledger(path, "run")
    fill(ledger, 2)
    ledger._db.execute("BEGIN IMMEDIATE")
    ledger._db.execute("INSERT INTO microbatch VALUES ('run', 2, 0, 'x', 1.0)")
    os._exit(9)


def test_a_process_killed_within_a_commit_leaves_no_trace_of_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_die_between, args=(tmp_path / "ledger.sqlite",))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    ledger = Ledger(tmp_path / "ledger.sqlite", "run")
    assert ledger.steps == 2 and ledger.audit(3).ok
    fill(ledger, 3)
    ledger.close()


def test_an_unusable_path_is_one_line(tmp_path):
    with pytest.raises(LocalError, match="check the disk"):
        Ledger(tmp_path / "missing" / "ledger.sqlite", "run")
