"""The built-in decoder, Hugging Face folders, and a user's own file."""

import subprocess
import sys

import pytest
import torch

from geotrain import models
from geotrain.config import FactoryModel, GptModel, HfModel, LoraSection
from geotrain.errors import ConfigError, DataError, UserError
from geotrain.graph.deferred import record

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "context": 16}
SHAPES = {
    "llama": GptModel(**SMALL),
    "grouped": GptModel(**SMALL, kv_heads=2, mlp_hidden=48, dtype="bfloat16"),
    "gpt2": GptModel(**SMALL, norm="layer", mlp="gelu", positions="learned", bias=True, tied=True, dropout=0.1),
}


def tokens(batch=2):
    return torch.randint(0, 64, (batch, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_decoder_learns_and_every_parameter_takes_part(config):
    model = models.build(config, 64)
    loss, extras = model(tokens(), tokens().flip(1))
    assert model.training and loss.shape == () and extras["logits"].shape == (2, 16, 64)
    assert loss.item() == pytest.approx(4.16, abs=0.4)  # ln 64: it knows nothing yet
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {getattr(torch, config.dtype)}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_no_token_sees_the_next(config):
    model = models.build(config, 64).eval()
    one, other = tokens(), tokens()
    other[:, 9:] = (other[:, 9:] + 1) % 64
    a, b = (model(x, x)[1]["logits"] for x in (one, other))
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])


def test_rotary_attention_depends_on_distance_alone():
    place = torch.arange(12)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    rotation = models._rotation(place, 8)
    turned_q = models._rotate(q.expand(1, 1, 12, 8), rotation)
    turned_k = models._rotate(k.expand(1, 1, 12, 8), rotation)
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in range(5):
        assert scores.diagonal(distance).std() < 1e-5


def test_ties_meta_and_what_does_not_fit():
    tied = models.build(SHAPES["gpt2"], 64)
    assert tied.head.weight is tied.embedding.weight
    assert models.build(SHAPES["llama"], 64).head.weight is not None
    with torch.device("meta"):
        assert all(p.is_meta for p in models.build(SHAPES["llama"], 64).parameters())
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(DataError, match="reads tokens, not images"):
        models.build(SHAPES["llama"], None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    path = tmp_path_factory.mktemp("hf")
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def test_hugging_face(folder):
    model = models.build(HfModel(kind="hf", path=str(folder), context=16), 64)
    assert type(model).__name__ == "GPT2LMHeadModel" and model.training and not model.config.use_cache
    output = model(input_ids=tokens(), labels=tokens())
    assert output.loss.shape == ()
    half = models.build(HfModel(kind="hf", path=str(folder / "config.json"), context=16, dtype="bfloat16"), 64)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_adapters_are_float32_on_a_bfloat16_base(folder):
    config = HfModel(kind="hf", path=str(folder), context=16, dtype="bfloat16", lora=LoraSection(r=2))
    for adapted in (models.build(config, 64), record(lambda: models.build(config, 64))):
        types = {(p.requires_grad, p.dtype) for p in adapted.parameters()}
        assert types == {(True, torch.float32), (False, torch.bfloat16)}


def test_hugging_face_complaints(folder, tmp_path):
    def complaint(path=folder, vocab=64, context=16):
        with pytest.raises(UserError) as caught:
            models.build(HfModel(kind="hf", path=str(path), context=context), vocab)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "65 tokens, the model knows 64" in complaint(vocab=65)
    assert "more than the model's 32 positions" in complaint(context=33)
    assert "no config.json" in complaint(tmp_path / "none")
    for text in ("{", "{}", '{"model_type": "nothing"}'):
        (tmp_path / "config.json").write_text(text)
        assert "transformers cannot build" in complaint(tmp_path)


FACTORY = """
import torch, beside
class Model(torch.nn.Module):
    def forward(self, tokens, labels):
        return beside.loss
def make():
    return Model()
def wrong():
    return 3
def broken():
    return 1 / 0
"""


def test_a_users_own_file(tmp_path):
    (tmp_path / "beside.py").write_text("loss = 7")
    (tmp_path / "model.py").write_text(FACTORY)
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(\n")

    def build(name):
        return models.build(FactoryModel(kind="factory", factory=f"{tmp_path}/{name}"), 64)

    try:
        assert build("model.py:make")(None, None) == 7
        for name, error, expected in [
            ("none.py:make", ConfigError, "there is no file"),
            ("model.py:other", ConfigError, "has no function other"),
            ("model.py:wrong", ConfigError, "gave int; return an nn.Module"),
            ("model.py:broken", UserError, r"model.py:11 raised ZeroDivisionError"),
            ("syntax.py:f", UserError, r"syntax.py:2 raised SyntaxError"),
        ]:
            with pytest.raises(error, match=expected):
                build(name)
    finally:
        sys.path.remove(str(tmp_path))


def test_transformers_is_not_imported_before_it_is_needed():
    code = "import sys, geotrain.models, geotrain.data; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
