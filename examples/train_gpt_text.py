"""Train a small GPT from scratch on the text inside Python, over local peers, and check it against one process.

    python examples/train_gpt_text.py [--short] [--peers 3]

Shows: a module of your own in, weights out; the losses of the split run and of a plain loop are the same numbers.
Takes about 90 s on 2 cores (20 steps); `--short` about 20 s (3 steps).
"""

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F

import geotrain

CONTEXT, BATCH, MICROBATCHES, LR = 64, 16, 4, 3e-3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


class Gpt(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(0, len(data) - CONTEXT - 1, (steps, BATCH), generator=torch.Generator().manual_seed(0))
    windows = data[starts[..., None] + torch.arange(CONTEXT + 1)]
    return [{"tokens": w[:, :-1], "labels": w[:, 1:]} for w in windows]


def plain_losses(net: nn.Module, data: list[dict[str, torch.Tensor]]) -> list[float]:
    """The loop that one would write without geotrain; `seeded` gives it the same dropout."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    losses = []
    for step, batch in enumerate(data):
        parts = []
        for i in range(MICROBATCHES):
            microbatch = {name: tensor.chunk(MICROBATCHES)[i] for name, tensor in batch.items()}
            with geotrain.seeded(0, step, i):
                loss = net(**microbatch)
            (loss / MICROBATCHES).backward()
            parts.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / MICROBATCHES)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="three steps")
    parser.add_argument("--peers", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, data = Gpt(), batches(3 if options.short else 20)
    trainer = geotrain.Trainer(
        net, train_dataset=data, peers=options.peers, microbatches=MICROBATCHES, lr=LR, clip_norm=1.0, weight_decay=0.01
    )
    result = trainer.train()
    expected = plain_losses(net, data)
    for step, (ours, plain) in enumerate(zip(result.losses, expected, strict=True)):
        print(f"step {step + 1:2}: {options.peers} peers {ours:.6f}, one process {plain:.6f}")
    same = all(torch.equal(tensor, result.state_dict[name]) for name, tensor in net.state_dict().items())
    print(f"losses equal: {result.losses == expected}; weights equal to the last bit: {same}")


if __name__ == "__main__":
    main()
