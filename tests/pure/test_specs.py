"""Models in one line: what they become, and what a mistake is answered with."""

import json

import pytest

from geotrain.config import HfModel
from geotrain.errors import ConfigError
from geotrain.graph import graph_hash
from geotrain.planning import block_range
from geotrain.specs import open_spec


def test_a_transformer():
    job, graph = open_spec("transformer:blocks=3,hidden=64,seq=16,vocab=50,microbatch=2,microbatches=5,tied=true")
    assert (job.model.layers, job.model.heads) == (3, 1)
    assert (job.train.microbatches, job.train.microbatch_size) == (5, 2)
    assert graph.values["tokens"].spec.shape == (2, 16)
    assert graph.parameters["embedding.weight"].spec.shape == (50, 64)
    assert "head.weight" in graph.ties
    assert block_range(graph, 0, len(graph.ops)) == [0, 2]
    assert block_range(graph, 0, 1) is None


def test_a_hugging_face_config_without_weights(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 100,
        "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job, graph = open_spec(f"hf:{tmp_path},seq=16,dtype=bfloat16")
    assert isinstance(job.model, HfModel)
    assert graph.values["input_ids"].spec.shape == (1, 16)
    assert {p.spec.dtype for p in graph.parameters.values()} == {"bfloat16"}
    assert block_range(graph, 0, len(graph.ops)) == [0, 1]


def test_the_same_line_is_the_same_graph():
    line = "transformer:blocks=1,hidden=32,seq=8,vocab=20"
    assert graph_hash(open_spec(line)[1]) == graph_hash(open_spec(line)[1])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("transformer:blcks=2", "did you mean 'blocks'"),
        ("transformer:blocks=two", "blocks = 'two'"),
        ("transformer:blocks", "write blocks=VALUE"),
        ("transformer:hidden=30,heads=7", "heads = 7 must divide"),
        ("resnet:50", "is no model"),
        ("hf:", "is no model"),
        ("hf:/nowhere", "there is no config.json"),
    ],
)
def test_a_mistake_is_one_line(line: str, says: str):
    with pytest.raises(ConfigError, match=says):
        open_spec(line)
