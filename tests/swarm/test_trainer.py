"""The Python API over real peer processes equals a plain loop, to the last bit."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import geotrain
from geotrain.callbacks import TensorBoard
from geotrain.errors import CaptureError, UserError
from tests.zoo import make

ROOT = Path(__file__).parents[2]
SEED, LR = 3, 1e-3


def steps_of(name):
    """Two steps of two microbatches each."""
    net, batch = make(name)
    flipped = {k: v.flip(0) for k, v in batch.items()}
    return net, [
        {k: torch.cat([batch[k], flipped[k]]) for k in batch},
        {k: torch.cat([flipped[k], batch[k]]) for k in batch},
    ]


def plain_loop(net, batches, steps, optimizer):
    losses, grads = [], {}
    for step in range(steps):
        batch, total = batches[step % len(batches)], 0.0
        for i in range(2):
            with geotrain.seeded(SEED, step, i):
                out = net(**{k: v.chunk(2)[i] for k, v in batch.items()})
            loss = out if isinstance(out, torch.Tensor) else out["loss"]
            (loss / 2).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        grads = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
        losses.append(total / 2)
    return losses, grads


@pytest.mark.parametrize(
    ("name", "peers", "schedule"),
    [
        ("gpt2", 1, "1f1b"),
        ("gpt2", 4, "1f1b"),
        ("shared_weight", 3, "gpipe"),
        ("resnet", 6, "1f1b"),
        ("t5", 4, "gpipe"),
        ("unet", 2, "1f1b"),
    ],
)
def test_trainer_equals_a_plain_loop(tmp_path, name, peers, schedule):
    net, batches = steps_of(name)
    reference = copy.deepcopy(net)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    result = geotrain.Trainer(
        net, train_dataset=batches, peers=peers, microbatches=2, schedule=schedule, lr=LR, clip_norm=1.0, steps=3,
        seed=SEED, keep_gradients=True, run_dir=tmp_path / "run",
    ).train()  # fmt: skip
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items()), "the user's model is not touched"
    losses, grads = plain_loop(reference, batches, 3, torch.optim.AdamW(reference.parameters(), lr=LR))
    assert result.losses == losses
    state = reference.state_dict()
    assert sorted(result.state_dict) == sorted(state)
    assert [n for n, t in state.items() if not torch.equal(t, result.state_dict[n])] == []
    assert sorted(result.gradients) == sorted(grads)
    assert [n for n, g in grads.items() if not torch.equal(g, result.gradients[n])] == []


def test_arguments_and_datasets_of_transformers(tmp_path):
    """Two lines make of a script with the Trainer of transformers one with ours: samples of different lengths, an
    evaluation set with a short last batch."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=64,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).train()
    rows = [torch.arange(1 + i % 3, 6 + i % 3 + i % 4).tolist() for i in range(19)]
    samples = [{"input_ids": row, "labels": row} for row in rows]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=1e-2, lr_scheduler_type="constant", eval_steps=1, report_to=[], use_cpu=True,
    )  # fmt: skip
    told = []
    trainer = geotrain.Trainer(
        net, args, samples[:12], samples[12:], peers=2, run_dir=tmp_path / "run",
        callbacks=[told.append, TensorBoard(tmp_path / "board")],
    )  # fmt: skip
    result = trainer.train()
    assert sorted(result.held_out) == [0, 1, 2, 3] and result.held_out[3] < result.held_out[0]
    assert all(torch.equal(tensor, result.state_dict[name]) for name, tensor in net.state_dict().items())
    losses, labels = 0.0, 0
    with torch.no_grad():
        for row in rows[12:]:
            tokens = torch.tensor([row])
            losses += float(net.eval()(input_ids=tokens, labels=tokens).loss) * (len(row) - 1)
            labels += len(row) - 1
    assert result.held_out[3] == pytest.approx(losses / labels, rel=1e-5)
    assert any(type(event).__name__ == "Evaluated" for event in told) and list((tmp_path / "board").iterdir())
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_mistakes_are_told_before_anything_starts(tmp_path):
    net, batches = steps_of("unet")
    with pytest.raises(UserError, match="microbatches"):
        geotrain.Trainer(net, train_dataset=batches, microbatches=3, run_dir=tmp_path / "a")
    pairs = [(torch.randn(8, 4), torch.randn(8, 4))]
    with pytest.raises(CaptureError, match="not 2; if the last is the target, give Trainer a loss function"):
        geotrain.Trainer(torch.nn.Linear(4, 4), train_dataset=pairs, run_dir=tmp_path / "c")
    with pytest.raises(CaptureError, match="loss"):
        geotrain.Trainer(torch.nn.Linear(4, 4), train_dataset=[(torch.randn(8, 4),)], run_dir=tmp_path / "b").train()


def test_the_example_is_equal_to_one_process(tmp_path):
    script = ROOT / "examples" / "train_gpt_text.py"
    done = subprocess.run(
        [sys.executable, str(script), "--short"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "losses equal: True; weights equal to the last bit: True" in done.stdout
