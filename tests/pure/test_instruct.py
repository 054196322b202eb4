"""Prompts and responses become rows: only responses count, and samples that share a row do not see each other."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.config import parse_job
from geotrain.corpus import Bytes
from geotrain.data import open_source
from geotrain.errors import DataError
from geotrain.instruct import IGNORED, Exchange, Exchanges

ENCODE = Bytes().encode


def exchanges(*pairs):
    return [Exchange(ENCODE(prompt), ENCODE(response)) for prompt, response in pairs]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=9), st.text("cd", min_size=1, max_size=9)), min_size=1, max_size=30
    )
)
def test_every_response_is_learned_once(pairs):
    rows = Exchanges(exchanges(*pairs), 20, 256, shift=False, positions="position_ids")
    batch = rows.batch(np.arange(len(rows)))
    learned = sorted(bytes(batch["labels"][batch["labels"] != IGNORED].tolist()))

    assert learned == sorted("".join(r for _, r in pairs).encode())
    starts = (batch["position_ids"] == 0).sum().item()
    assert starts >= len(pairs)


def test_shifted_labels_are_the_tokens_that_follow():
    rows = Exchanges(exchanges(("ab", "cd")), 6, 256)
    batch = rows.batch(np.array([0]))
    assert bytes(batch["tokens"][0, :3].tolist()) == b"abc"
    assert batch["labels"][0].tolist() == [IGNORED, ord("c"), ord("d"), IGNORED, IGNORED, IGNORED]


def test_a_prompt_that_fills_the_context_is_left_out():
    with pytest.raises(DataError, match="no response begins within"):
        Exchanges(exchanges(("a" * 9, "b")), 8, 256)


def job(tmp_path, model, **data):
    lines = [json.dumps({"question": f"{i} + {i}?", "answer": str(2 * i)}) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    section = {"kind": "instruct", "path": ["data.jsonl"], "prompt": "question", "response": "answer", **data}
    return parse_job(json.dumps({"model": model, "data": section}), "job", tmp_path)


def test_a_job_on_instructions(tmp_path):
    source = open_source(job(tmp_path, {"kind": "gpt", "context": 24}, end="."))
    batch = source.train(0, 0)
    text = bytes(batch["tokens"][0][batch["tokens"][0] > 0].tolist())
    label = bytes(batch["labels"][0][batch["labels"][0] != IGNORED].tolist())
    prompt, _, answer = text.partition(b"\n")
    assert prompt.endswith(b"?") and label == answer + b"." and source.masked


def test_samples_in_one_row_do_not_see_each_other(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=256,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config).eval()
    net.save_pretrained(tmp_path / "model")
    pairs = exchanges(("12+1=", "13"), ("2+2=", "4"), ("3+30=", "33"))
    rows = Exchanges(pairs, 24, 256, names=("input_ids", "labels"), shift=False, positions="position_ids")
    packed = rows.batch(np.array([0]))
    assert len(rows) == 1
    with torch.no_grad():
        together = net(**packed, use_cache=False).loss * int((packed["labels"] != IGNORED).sum())
        alone = 0.0
        for exchange in pairs:
            one = Exchanges([exchange], 24, 256, names=("input_ids", "labels"), shift=False).batch(np.array([0]))
            alone += net(**one, use_cache=False).loss * int((one["labels"] != IGNORED).sum())
    torch.testing.assert_close(together, alone)
    model = {"kind": "hf", "path": "model", "context": 24}
    assert "position_ids" in open_source(job(tmp_path, model)).train(0, 0)
    assert "position_ids" not in open_source(job(tmp_path, model, pack=False)).train(0, 0)


def test_a_folder_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"question": [f"q{i}" for i in range(40)], "answer": [f"a{i}" for i in range(40)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    source = open_source(job(tmp_path, {"kind": "gpt", "context": 8}, path=["saved"]))
    assert source.train(0, 0)["tokens"].shape == (2, 8)
    with pytest.raises(DataError, match="record 1 has no 'absent'; it has 'question', 'answer'"):
        open_source(job(tmp_path, {"kind": "gpt", "context": 8}, path=["saved"], prompt="absent"))
