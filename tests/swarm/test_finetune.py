"""Fine-tuning over real processes: Hugging Face folder in, equal to one process, Hugging Face folder out."""

import json

import pytest
import torch
from safetensors.torch import load_file

from geotrain.checkpoint import best_so_far, latest
from geotrain.config import parse_job
from geotrain.errors import UserError
from geotrain.here import train_here
from geotrain.jobs import resume_job, run_folder
from geotrain.manifest import OPTIMIZER
from geotrain.runfolder import EVENTS
from geotrain.trained import export

PEERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny pretrained model, its weights in several shards, and instructions."""
    import transformers

    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=256, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model", max_shard_size="20KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    lines = [json.dumps({"prompt": f"{i}+{i}", "response": f"is {2 * i}."}) for i in range(60)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


def train(folder, name, model=None, train=None, **sections):
    job = parse_job(
        json.dumps({
            "run": {"dir": str(folder / "runs"), "name": name},
            "model": {"kind": "hf", "path": "model", "context": 32, **(model or {})},
            "data": {"kind": "instruct", "path": ["data.jsonl"], "held_out": 0.2},
            "train": {
                "steps": 4, "lr": 1e-2, "microbatches": 3, "microbatch_size": 1, "warmup_steps": 0, **(train or {})
            },
            "pipeline": {"peers": PEERS, "stages": PEERS},
            "compression": {"max_loss_increase": 0},
            **sections,
        }), "job", folder,
    )  # fmt: skip
    _, result = train_here(job, name)
    return run_folder(job), result


def happened(run_dir, kind):
    rows = map(json.loads, (run_dir / EVENTS).read_text().splitlines())
    return [row for row in rows if row["event"] == kind]


def sent(run_dir, what):
    """Bytes that the coordinator sent to peers that loaded their stages."""
    return sum(row[what] for row in happened(run_dir, "Fetched"))


@torch.no_grad()
def likeliest(model, prompt, count):
    """What a plain model of transformers says next, where a token is a byte."""
    seen = list(prompt.encode())
    for _ in range(count):
        seen.append(int(model.eval()(torch.tensor([seen]), use_cache=False).logits[0, -1].argmax()))
    return bytes(seen[len(prompt) :]).decode(errors="replace").partition("\n")[0]


@torch.no_grad()
def held_out(model, run_dir):
    """What the run calls its held-out loss, by a plain model of transformers."""
    work = resume_job(run_dir)
    count = min(work.job.evaluate.microbatches, work.source.held_out_microbatches)
    losses = []
    for i in range(count):
        batch = dict(work.source.held_out(i))
        weight = batch.pop("loss_weight")
        losses.append(float(model.eval()(**batch, use_cache=False).loss * weight))
    return sum(losses) / count


def test_lora_from_a_folder_to_folders(folder, monkeypatch):
    import peft
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("HOME", str(folder))  # where peers keep their caches
    evaluate = {"every": 1, "keep_best": True, "prompts": ["7+7", "a prompt"], "tokens": 5}
    run_dir, result = train(folder, "lora", {"lora": {"r": 4}}, evaluate=evaluate)
    assert result.held_out[4] < result.held_out[0]
    checkpoint = latest(run_dir)
    assert checkpoint is not None
    names = [n for file in checkpoint.manifest.files.values() for n in file.tensors]
    assert names and all(".lora_" in name for name in names), "no frozen weight is in a checkpoint"
    adapters = sum(checkpoint.store.spec(n).nbytes for n in names if not n.startswith(OPTIMIZER))
    saved = sum(checkpoint.store.spec(n).nbytes for n in names)
    assert 3 * adapters <= saved < 1.05 * 3 * adapters, "adapters and AdamW's two moments of them"
    parameters = resume_job(run_dir).graph.parameters
    frozen = sum(p.spec.nbytes for p in parameters.values() if not p.requires_grad)
    tied = parameters["base_model.model.model.embed_tokens.weight"].spec.nbytes  # the first and the last stage read it
    alike = sum(p.spec.nbytes for name, p in parameters.items() if "norm" in name)  # all ones
    came = sent(run_dir, "base_bytes")
    assert frozen - alike <= came <= frozen + tied, "once a peer, and not what its machine has already"
    assert sent(run_dir, "state_bytes") == 0, "fresh adapters are made where they are used"
    assert best_so_far(run_dir) == (4, result.held_out[4])
    export(run_dir, folder / "merged")
    with pytest.raises(UserError, match="holds files, maybe another model's; export into a new folder"):
        export(run_dir, folder / "model")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert held_out(merged, run_dir) == pytest.approx(result.held_out[4], abs=1e-5)
    said = [(row["prompt"], row["text"]) for row in happened(run_dir, "Continued")]
    assert said == [(prompt, likeliest(merged, f"{prompt}\n", 5)) for prompt in evaluate["prompts"]]
    export(run_dir, folder / "adapter", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter")
    assert held_out(adapted, run_dir) == pytest.approx(result.held_out[4], abs=1e-5)
    assert "base_model.model.model.embed_tokens.weight" in result.state_dict(), "the frozen weights come with it"
    cached = {path.name for path in (folder / ".cache" / "geotrain" / "tensors").iterdir()}
    times = {path: path.stat().st_mtime_ns for path in (folder / ".cache" / "geotrain" / "tensors").iterdir()}
    assert len(cached) >= 3 * 7, "every frozen matrix, once for all peers of the machine"
    once_more, again = train(folder, "lora-again", {"lora": {"r": 4}})
    assert again.losses == result.losses
    assert sent(once_more, "base_bytes") == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times, "nothing frozen was fetched again"


def test_no_steps_change_no_weight(folder):
    run_dir, result = train(folder, "none", train={"steps": 0})
    assert result.losses == [] and list(result.held_out) == [0]
    export(run_dir, folder / "same")
    before = {}
    for path in (folder / "model").glob("*.safetensors"):
        before |= load_file(path)
    after = load_file(folder / "same" / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[n], t) for n, t in before.items())


def test_all_weights_with_a_frozen_part_and_an_early_end(folder):
    """A learning rate that ruins the model: the held-out loss rises, and the run ends before its steps are done."""
    from transformers import AutoModelForCausalLM

    frozen = {"freeze": ["model.embed_tokens.weight", "model.layers.0.*"]}
    run_dir, result = train(
        folder, "frozen", frozen, {"steps": 40, "lr": 10.0, "clip_norm": 0}, evaluate={"every": 1, "patience": 2}
    )  # fmt: skip
    assert 2 <= len(result.losses) < 40
    export(run_dir, folder / "ruined")
    ruined = AutoModelForCausalLM.from_pretrained(folder / "ruined")
    last = max(result.held_out)
    assert held_out(ruined, run_dir) == pytest.approx(result.held_out[last], rel=1e-5)
    first = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    same = {name for name, tensor in ruined.state_dict().items() if torch.equal(tensor, first[name])}
    assert "model.embed_tokens.weight" in same and "model.layers.0.mlp.up_proj.weight" in same
    assert "model.layers.1.mlp.up_proj.weight" not in same
