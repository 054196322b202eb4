"""Small models of many kinds, each with one microbatch, whose forward ends in the loss."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, torch.Tensor]]
ZOO: dict[str, Callable[[], Made]] = {}


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    ZOO[make.__name__] = make
    return make


def _tokens(batch: int = 2, length: int = 16, vocab: int = 64) -> torch.Tensor:
    return torch.randint(3, vocab, (batch, length))


def _causal(net: nn.Module) -> Made:
    tokens = _tokens()
    return net, {"input_ids": tokens, "labels": tokens.clone()}


_TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@model
def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=32,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _causal(GPT2LMHeadModel(config))


@model
def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _causal(LlamaForCausalLM(LlamaConfig(**_TINY)))


@model
def gemma2() -> Made:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return _causal(Gemma2ForCausalLM(Gemma2Config(**_TINY, head_dim=8, attention_dropout=0.1)))


@model
def qwen3() -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _causal(Qwen3ForCausalLM(Qwen3Config(**_TINY, head_dim=8)))


@model
def gpt_neox() -> Made:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    tiny = {k: v for k, v in _TINY.items() if k != "num_key_value_heads"}
    return _causal(GPTNeoXForCausalLM(GPTNeoXConfig(**tiny, hidden_dropout=0.1)))


@model
def opt() -> Made:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, ffn_dim=64, vocab_size=64, word_embed_proj_dim=32,
        max_position_embeddings=32, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _causal(OPTForCausalLM(config))


@model
def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _causal(MixtralForCausalLM(MixtralConfig(**_TINY, num_local_experts=4, output_router_logits=True)))


@model
def mamba() -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64, state_size=8, use_cache=False)
    return _causal(MambaForCausalLM(config))


@model
def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    tiny = {k: v for k, v in _TINY.items() if k not in ("num_key_value_heads", "use_cache")}
    net = BertForMaskedLM(BertConfig(**tiny))
    tokens = _tokens()
    labels = torch.where(torch.rand(tokens.shape) < 0.3, tokens, -100)
    mask = torch.ones_like(tokens)
    mask[1, 10:] = 0
    return net, {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@model
def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=2,
        d_model=32,
        num_heads=4,
        d_ff=64,
        d_kv=8,
        vocab_size=64,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(length=12)}


@model
def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "labels": torch.randint(0, 10, (2,)),
    }


class _ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += self.short(x)
        return self.act(y)


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(_ResBlock(8, 8, 1), _ResBlock(8, 16, 2), _ResBlock(16, 16, 1))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(self.drop(features)), labels)


@model
def resnet() -> Made:
    return _ResNet(), {"images": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 10, (4,))}


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.mid = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Dropout2d(0.1))
        self.up1, self.up2 = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1)
        self.last = nn.Conv2d(8 + 8 + 3, 3, 1)
        self.time = nn.Linear(4, 8)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        a = self.down1(noisy)
        a = a + self.time(time)[:, :, None, None]
        b = self.mid(self.down2(F.silu(a)))
        c = self.up2(torch.cat([self.up1(b), a], 1))
        out = self.last(torch.cat([F.silu(c), a, noisy], 1))
        return {"loss": F.mse_loss(out, noise)}


@model
def unet() -> Made:
    return _UNet(), {
        "noisy": torch.randn(2, 3, 16, 16),
        "time": torch.randn(2, 4),
        "noise": torch.randn(2, 3, 16, 16),
    }


class _InPlace(nn.Module):
    """In-place changes of activations and of views of them, a buffer that counts, blocks without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        whole = torch.zeros(x.shape)
        whole[:, 2:] += h[:, 2:]
        whole[:, 0] = h[:, 1] * 2
        part = whole.view(-1, 2, 4)
        part.mul_(0.5)
        with torch.no_grad():
            scale = self.second(h).abs().mean()
        self.calls.add_(1)
        h = F.relu_(h)
        both = self.second(h) + 1
        left, right = both[:, :4], both[:, 4:]
        left.sub_(right)
        left += torch.tensor([1.0, 2.0, 3.0, 4.0])
        return ((torch.cat([left, right], 1) + whole + scale) - y).pow(2).mean()


@model
def in_place() -> Made:
    return _InPlace(), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}


class _Shared(nn.Module):
    """One weight used at the beginning, in the middle and at the end, and one value used everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x)) + first * torch.sigmoid(x @ self.embed.weight.T @ self.embed.weight)
            x = F.dropout(x, 0.1, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@model
def shared_weight() -> Made:
    return _Shared(), {"tokens": torch.randint(0, 32, (2, 8)), "labels": torch.randint(0, 32, (2, 8))}


def make(name: str, seed: int = 0) -> Made:
    """The model in train mode and its microbatch, always the same for one seed."""
    torch.manual_seed(seed)
    net, batch = ZOO[name]()
    return net.train(), batch
