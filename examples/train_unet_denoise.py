"""Train a U-Net, whose skip connections jump over stages, to remove noise from digits, over local peers.

    pip install scikit-learn
    python examples/train_unet_denoise.py [--short] [--peers 3]

Shows: values that go from the stage that makes them straight to a stage far behind (what `torch.distributed.pipelining`
refuses), and a result that equals one process to the last bit. 40 steps; `--short` does 4.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import geotrain

BATCH, MICROBATCHES, NOISE, LR = 64, 4, 0.4, 2e-3


class UNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.middle = nn.Sequential(
            nn.GroupNorm(4, 4 * width), nn.SiLU(), nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.SiLU()
        )
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.leave = nn.Conv2d(width + 1, 1, 1)

    def forward(self, noisy: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.enter(noisy))
        b = F.silu(self.down1(a))
        c = self.middle(self.down2(b))
        b = F.silu(self.join2(torch.cat([self.up2(c), b], 1)))
        a = F.silu(self.join1(torch.cat([self.up1(b), a], 1)))
        return F.mse_loss(self.leave(torch.cat([a, noisy], 1)), clean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="four steps")
    parser.add_argument("--peers", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16  # [1797, 1, 8, 8]
    noisy = images + NOISE * torch.randn(images.shape)
    held_out, train = slice(0, 256), slice(256, None)
    steps = 4 if options.short else 40
    batches = []
    for _ in range(steps):
        chosen = torch.randint(0, len(images[train]), (BATCH,))
        batches.append({"noisy": noisy[train][chosen], "clean": images[train][chosen]})

    net = UNet()
    result = geotrain.Trainer(
        net, train_dataset=batches, peers=options.peers, microbatches=MICROBATCHES, lr=LR, weight_decay=0.01
    ).train()

    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01)  # the same, in one process
    losses = []
    for batch in batches:
        parts = []
        for i in range(MICROBATCHES):
            loss = net(**{name: tensor.chunk(MICROBATCHES)[i] for name, tensor in batch.items()})
            (loss / MICROBATCHES).backward()
            parts.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts) / MICROBATCHES)
    same = all(torch.equal(tensor, result.state_dict[name]) for name, tensor in net.state_dict().items())
    print(f"losses equal: {result.losses == losses}; weights equal to the last bit: {same}")
    with torch.no_grad():
        error = net(noisy[held_out], images[held_out]).item()
    print(f"held-out error {error:.4f}, of doing nothing {F.mse_loss(noisy[held_out], images[held_out]).item():.4f}")


if __name__ == "__main__":
    main()
