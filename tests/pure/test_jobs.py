"""A run's folder belongs to its run: neither a second one nor a plan touches what is in it."""

import json

import pytest
import torch

from geotrain.config import parse_job
from geotrain.errors import UserError
from geotrain.graph import graph_hash
from geotrain.jobs import graph_of, open_job, run_folder
from geotrain.ledger import Ledger
from geotrain.runfolder import LEDGER
from geotrain.runstate import CommitRow
from geotrain.trainer import Trainer

FACTORY = """
import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size=256):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, 8)
        self.out = torch.nn.Linear(8, vocab_size)

    def forward(self, tokens, labels):
        return torch.nn.functional.cross_entropy(self.out(self.embed(tokens)).flatten(0, 1), labels.flatten())

def make():
    return Model()
"""


def commit(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / LEDGER, name)
    ledger.commit(CommitRow(0, 1, 1.0, 1.0, 1.0, 1e-3, False, 0.1), ["0/0"], [1.0])
    ledger.close()


@pytest.fixture
def job(tmp_path):
    (tmp_path / "factory.py").write_text(FACTORY)
    model = {"kind": "factory", "factory": "factory.py:make", "init": "real", "context": 8}
    return parse_job(json.dumps({"run": {"name": "first", "dir": str(tmp_path)}, "model": model}), "job", tmp_path)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_plan_leaves_nothing_behind(job, tmp_path):
    graph = graph_of(job)
    assert not run_folder(job).exists()
    assert graph_hash(graph) == graph_hash(open_job(job).graph)


def test_a_run_of_the_same_name_leaves_the_first_ones_weights(job):
    work = open_job(job)
    assert work.weights is not None
    work.weights.close()
    commit(run_folder(job), "first")
    before = contents(run_folder(job))
    assert any(path.name == "model.safetensors" for path in before)
    with pytest.raises(UserError, match="holds a run of 1 step; resume it, or choose another run name"):
        open_job(job)
    assert contents(run_folder(job)) == before


def test_a_trainer_leaves_a_used_folder_alone(tmp_path):
    commit(tmp_path / "used", "trainer")
    before = contents(tmp_path)
    batches = [(torch.randn(4, 3), torch.randn(4, 1))]
    with pytest.raises(UserError, match="holds a run of 1 step"):
        Trainer(
            torch.nn.Linear(3, 1), train_dataset=batches, loss=torch.nn.functional.mse_loss, run_dir=tmp_path / "used"
        )
    assert contents(tmp_path) == before
