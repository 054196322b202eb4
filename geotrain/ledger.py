"""The ledger of a run: which microbatch was counted in which step. SQLite, one file in the run folder. I/O.

A step is in the run when its commit row is on disk (`synchronous=FULL`), and only then are the stages told
to apply it. Its microbatch rows and its commit row are written in one transaction: there is no half a step.
"""

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from .errors import LocalError
from .runstate import CommitRow

_SCHEMA = """
CREATE TABLE IF NOT EXISTS microbatch (
  run TEXT NOT NULL, step INTEGER NOT NULL, microbatch INTEGER NOT NULL,
  sample TEXT NOT NULL, loss REAL,
  UNIQUE (run, step, microbatch)
);
CREATE TABLE IF NOT EXISTS step_commit (
  run TEXT NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL,
  loss REAL, grad_norm REAL, clip REAL NOT NULL, lr REAL NOT NULL,
  skipped INTEGER NOT NULL, seconds REAL NOT NULL,
  UNIQUE (run, step)
);
CREATE TABLE IF NOT EXISTS rollback (
  run TEXT NOT NULL, epoch INTEGER NOT NULL, from_step INTEGER NOT NULL, to_step INTEGER NOT NULL,
  steps INTEGER NOT NULL, microbatches INTEGER NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class Audit:
    """The answer to: was every (step, microbatch) counted exactly once?

    `missing` and `doubled` are (step, microbatch) pairs of committed steps; `stray` are rows of steps that
    have no commit row or of microbatches that the job does not have; `gaps` are steps without a commit row
    between others.
    """

    steps: int
    microbatches: int
    missing: tuple[tuple[int, int], ...]
    doubled: tuple[tuple[int, int], ...]
    stray: tuple[tuple[int, int], ...]
    gaps: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return not (self.missing or self.doubled or self.stray or self.gaps)


class Ledger:
    """The ledger in `path` as one run sees it, for one thread. Raises `LocalError` when the disk fails."""

    def __init__(self, path: Path, run: str) -> None:
        self.run = run
        with _disk(path):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        self._path = path

    @property
    def steps(self) -> int:
        """How many steps are committed; the next step's number."""
        (last,) = self._db.execute("SELECT max(step) FROM step_commit WHERE run = ?", (self.run,)).fetchone()
        return 0 if last is None else int(last) + 1

    def commit(self, row: CommitRow, samples: Sequence[str], losses: Sequence[float]) -> None:
        """Write step `row.step` with its microbatches' sample keys and losses, all or nothing, durably.

        Raises `LocalError` if the step is not the next one, or the disk refuses.
        """
        with self._transaction():
            if row.step != self.steps:
                raise LocalError(f"step {row.step} cannot be committed: the ledger is at step {self.steps}")
            self._db.executemany(
                "INSERT INTO microbatch VALUES (?, ?, ?, ?, ?)",
                [
                    (self.run, row.step, i, sample, _number(loss))
                    for i, (sample, loss) in enumerate(zip(samples, losses, strict=True))
                ],
            )
            values = [_number(value) if isinstance(value, float) else value for value in astuple(row)]
            self._db.execute("INSERT INTO step_commit VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (self.run, *values))

    def roll_back(self, step: int, epoch: int) -> int:
        """Forget everything from step number `step` on, because the run goes on from an older checkpoint;
        `epoch` is the one that will redo it. Returns how many steps were forgotten; none leaves no trace."""
        with self._transaction():
            at = self.steps
            if at <= step:
                return 0
            where = "WHERE run = ? AND step >= ?"
            rows = self._db.execute(f"DELETE FROM microbatch {where}", (self.run, step)).rowcount
            self._db.execute(f"DELETE FROM step_commit {where}", (self.run, step))
            self._db.execute(
                "INSERT INTO rollback VALUES (?, ?, ?, ?, ?, ?)", (self.run, epoch, at, step, at - step, rows)
            )
            return at - step

    def commits(self) -> list[CommitRow]:
        """Every committed step, in order."""
        rows = self._db.execute(
            "SELECT step, epoch, loss, grad_norm, clip, lr, skipped, seconds FROM step_commit "
            "WHERE run = ? ORDER BY step",
            (self.run,),
        )
        return [
            CommitRow(step, epoch, _real(loss), _real(norm), clip, lr, bool(skipped), seconds)
            for step, epoch, loss, norm, clip, lr, skipped, seconds in rows
        ]

    def losses(self, step: int) -> list[float]:
        """The losses of a step's microbatches, in order."""
        rows = self._db.execute(
            "SELECT loss FROM microbatch WHERE run = ? AND step = ? ORDER BY microbatch", (self.run, step)
        )
        return [_real(loss) for (loss,) in rows]

    def rollbacks(self) -> list[tuple[int, int, int]]:
        """(epoch, from step, to step) of every time the run went back, in order."""
        query = "SELECT epoch, from_step, to_step FROM rollback WHERE run = ? ORDER BY rowid"
        return list(self._db.execute(query, (self.run,)))

    def audit(self, microbatches: int) -> Audit:
        """Check that each of `microbatches` microbatches of every committed step is there exactly once."""
        counts = {
            (step, microbatch): count
            for step, microbatch, count in self._db.execute(
                "SELECT step, microbatch, count(*) FROM microbatch WHERE run = ? GROUP BY step, microbatch",
                (self.run,),
            )
        }
        query = "SELECT step FROM step_commit WHERE run = ?"
        committed = {step for (step,) in self._db.execute(query, (self.run,))}
        expected = [(step, i) for step in sorted(committed) for i in range(microbatches)]
        return Audit(
            steps=len(committed),
            microbatches=sum(counts.values()),
            missing=tuple(pair for pair in expected if pair not in counts),
            doubled=tuple(sorted(pair for pair, count in counts.items() if count > 1)),
            stray=tuple(sorted(counts.keys() - set(expected))),
            gaps=tuple(step for step in range(self.steps) if step not in committed),
        )

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _disk(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LocalError(f"the ledger {path} cannot be used: {error}; check the disk's space and rights") from error


def _number(value: float) -> float | None:
    """SQLite keeps infinities, but has no NaN: it is stored as NULL."""
    return None if math.isnan(value) else value


def _real(value: float | None) -> float:
    return math.nan if value is None else value
