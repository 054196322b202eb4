"""Families of models that nothing in the package knows by name: 5 steps on 3 stages equal one process, all weights,
LoRA, and LoRA on a bfloat16 base, with microbatches that hold different numbers of labels."""

import copy
import random
import warnings

import pytest
import torch

from geotrain.graph import capture, cut, seeded
from geotrain.graph.weigh import WEIGHT, Places, weighted
from tests.pipeline import Pipeline

_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 64, "use_cache": False}
_LAYERS = {
    "num_layers": 2, "d_model": 32, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip

FAMILIES = {
    "Granite": _SIZES, "Starcoder2": _SIZES, "Cohere": _SIZES, "Nemotron": _SIZES, "Glm": {**_SIZES, "head_dim": 8},
    "Helium": {**_SIZES, "head_dim": 8}, "SmolLM3": _SIZES, "GPTBigCode": _GPT, "XGLM": _LAYERS,
    "BioGpt": {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"},
}  # fmt: skip

LENGTH = 12


def model(family, kind):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    net = getattr(transformers, f"{family}ForCausalLM")(config).train()
    if kind == "full":
        return net
    if kind == "lora-bfloat16":
        net = net.to(torch.bfloat16)  # adapters stay float32
    import peft

    settings = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(net, settings).train()


def batch(step, microbatch):
    """Labels of -100 behind a random length: microbatches hold different numbers of them."""
    random = torch.Generator().manual_seed(100 * step + microbatch)
    tokens = torch.randint(3, 64, (2, LENGTH), generator=random)
    labels = tokens.clone()
    for row in labels:
        row[: 1 + int(torch.randint(0, LENGTH - 2, (), generator=random))] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("kind", ["full", "lora", "lora-bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_three_stages_equal_one_process(family, kind):
    net = model(family, kind)
    graph = capture(net, batch(0, 0))
    places = Places.of(graph)
    assert places is not None
    graph = weighted(graph)
    rng = random.Random(family)
    stages = cut(graph, sorted(rng.sample(range(len(graph.ops) // 8, len(graph.ops) * 7 // 8), 2)))
    twin = copy.deepcopy(net)
    pipeline = Pipeline(stages, dict(net.named_parameters()) | dict(net.named_buffers()), seed=3, microbatches=2)
    ours = [torch.optim.AdamW(r.parameters.values(), lr=1e-2, foreach=False) for r in pipeline.runners if r.parameters]
    trained = [p for p in twin.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    for step in range(5):
        batches = [batch(step, i) for i in range(2)]
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        assert [places.count(b) for b in batches] == counts
        weights = [torch.tensor(2 * count / sum(counts), dtype=torch.float32) for count in counts]
        losses = pipeline.step(step, [{**b, WEIGHT: w} for b, w in zip(batches, weights, strict=True)])
        for i, (inputs, weight) in enumerate(zip(batches, weights, strict=True)):
            with seeded(3, step, i):
                loss = twin(**inputs).loss * weight
            assert losses[i].item() == loss.item()
            (loss / 2).backward()
        for optimizer in (*ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    parameters = {n: p for r in pipeline.runners for n, p in r.parameters.items()}
    expected = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
