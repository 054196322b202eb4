"""Bytes, error and speed of every codec, on one thread, beside what an Ethernet link of 1 Gbit/s needs.

    python -m tests.benchmarks --only codecs [--short]

A link of B bit/s that carries tensors at f times fewer bytes than float32 needs f * B / 8 bytes a second of float32
from encoding and decoding together, if one thread does both and nothing overlaps. `geotrain bench codecs` is the same
for users.
"""

from geotrain.bench import figures, messages
from geotrain.codecs import CODECS, fast, get_codec

from .tables import Table, alternate, ratio

GIGABIT = 125e6


def benchmark(short: bool) -> list[Table]:
    tensors = messages(8, 128, 256 if short else 512, "float32")
    rounds = 2 if short else 10
    rows = []
    for codec in CODECS.values():
        row = figures(codec, tensors, rounds)
        needed = 4 / row.bytes_per_element * GIGABIT / 1e6
        rows.append([
            row.codec, round(row.bytes_per_element, 3), round(row.factor, 2), float(f"{row.error:.2g}"),
            float(f"{row.bias:.1g}"), round(row.encode_mb_per_s), round(row.decode_mb_per_s), round(row.both_mb_per_s),
            round(needed), "yes" if row.both_mb_per_s >= needed else "",
        ])  # fmt: skip
    columns = [
        "codec", "bytes/element", "times under bf16", "error", "bias", "encode MB/s", "decode MB/s", "both MB/s",
        "1 Gbit/s needs", "keeps up",
    ]  # fmt: skip
    seconds = alternate(
        3 if short else 7,
        {name: lambda name=name: 1 / figures(get_codec(name), tensors[:2], 3).both_mb_per_s
         for name in ("bf16", "hd4", "ecm-2")},
    )  # fmt: skip
    return [
        Table(
            "Codecs on one thread, float32 tensors of 8 x 128 tokens",
            columns,
            rows,
            notes=["native kernels" if fast.kernels(tensors[0].device) else "torch only: numba is not installed"],
            ratios={f"{name} over bf16, seconds": ratio(seconds[name], seconds["bf16"]) for name in ("hd4", "ecm-2")},
        )
    ]
