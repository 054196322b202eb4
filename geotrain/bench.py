"""`geotrain bench codecs`: what each codec does to a tensor on this machine, and how fast. I/O.

The tensor is made up, and like what crosses links: tokens of unequal sizes, a few channels that stand out. Four
messages cross one boundary, the last two with the samples of the first two, a little changed; the first two only fill
the memory of codecs that have one. Times are the best of some rounds, of encoding and of decoding, for the bytes of the
tensor as it is in memory; they are the thread's own, so that other work on the machine does not count.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .codecs import CODECS, Codec, Message, get_codec
from .disk import needs_folder, write_atomic
from .graph.ops import to_dtype
from .graph.serial import tensor_spec


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """Bytes on the wire for each element; against bf16; squared error over squared size; how much is lost or gained of
    the tensor itself (0 in the mean for an unbiased codec); MB (10**6) a second of the source."""

    codec: str
    bytes_per_element: float
    factor: float
    error: float
    bias: float
    encode_mb_per_s: float
    decode_mb_per_s: float

    @property
    def both_mb_per_s(self) -> float:
        return 1 / (1 / self.encode_mb_per_s + 1 / self.decode_mb_per_s)


_clock = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-4 else time.perf_counter


def messages(samples: int, tokens: int, channels: int, dtype: str) -> list[torch.Tensor]:
    """Four tensors (samples, tokens, channels) of one boundary."""
    random = torch.Generator().manual_seed(0)
    channel = torch.exp(0.5 * torch.randn(channels, generator=random))
    channel[torch.randperm(channels, generator=random)[: channels // 50]] *= 8
    token = torch.exp(0.3 * torch.randn(samples, tokens, 1, generator=random))
    shape = samples, tokens, channels
    first = [torch.randn(shape, generator=random) for _ in range(2)]
    again = [x + 0.1 * torch.randn(shape, generator=random) for x in first]
    return [(x * token * channel).to(to_dtype(dtype)) for x in (*first, *again)]


def figures(codec: Codec, tensors: Sequence[torch.Tensor], rounds: int) -> CodecFigures:
    """Of the second half of the tensors, which have the samples of the first."""
    spec = tensor_spec(tensors[0])
    sender = receiver = codec.init(spec)
    best_encode = best_decode = float("inf")
    nbytes, lost, moved, total = 0, 0.0, 0.0, 0.0
    half = len(tensors) // 2
    for number, x in enumerate(tensors):
        first = number % half * len(x)
        message = Message(0x9E3779B97F4A7C15 * (number + 1) % 2**64, tuple(range(first, first + len(x))))
        measured = number >= half
        state, payload = sender, []
        for _ in range(rounds if measured else 1):
            start = _clock()
            payload, state = codec.encode(x, sender, message)
            best_encode = min(best_encode, _clock() - start)
        sender, before = state, receiver
        wire = memoryview(bytearray(b"".join(payload)))
        y = x
        for _ in range(rounds if measured else 1):
            start = _clock()
            y, receiver = codec.decode(wire, spec, x.device, before, message)
            best_decode = min(best_decode, _clock() - start)
        if not measured:
            continue
        a, b = x.double(), y.double()
        nbytes += wire.nbytes
        lost += (b - a).square().sum().item()
        moved += (a * (b - a)).sum().item()
        total += a.square().sum().item()
    each = nbytes / (len(tensors) - half)
    return CodecFigures(
        codec.name, each / spec.numel, 2 * spec.numel / each, lost / total, moved / total,
        spec.nbytes / best_encode / 1e6, spec.nbytes / best_decode / 1e6,
    )  # fmt: skip


def codecs(
    names: Sequence[str],
    *,
    samples: int = 8,
    tokens: int = 128,
    channels: int = 512,
    dtype: str = "float32",
    rounds: int = 5,
    json_path: Path | None = None,
) -> None:
    """Print the table of the codecs called `names`, or of all. Raises `PlanError` for a name that is none, `UserError`
    for a file that has no folder."""
    needs_folder(json_path)
    chosen = [get_codec(name) for name in names] or list(CODECS.values())
    torch.set_num_threads(1)
    tensors = messages(samples, tokens, channels, dtype)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        "codec", "bytes/element", "against bf16", "error", "bias", "encode MB/s", "decode MB/s", "both MB/s",
        box=SIMPLE_HEAD,
        title=f"{samples} x {tokens} x {channels} {dtype}, one thread", title_justify="left",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[CodecFigures] = []
    for codec in chosen:
        row = figures(codec, tensors, rounds)
        rows.append(row)
        table.add_row(
            f"{row.codec}{' =' if codec.lossless else ' u' if codec.unbiased else ''}",
            f"{row.bytes_per_element:.3f}", f"{row.factor:.2f}x", f"{row.error:.2g}", f"{row.bias:+.1e}",
            f"{row.encode_mb_per_s:,.0f}", f"{row.decode_mb_per_s:,.0f}", f"{row.both_mb_per_s:,.0f}",
        )  # fmt: skip
    console.print(table)
    console.print("= lossless, u unbiased; error: squared, relative; MB of the source tensor", highlight=False)
    if json_path is not None:
        write_atomic(json_path, json.dumps([asdict(row) for row in rows], indent=2).encode())
