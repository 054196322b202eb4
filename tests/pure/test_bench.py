"""`geotrain bench codecs` on small tensors: the figures are those of the codecs."""

import json
from pathlib import Path

import pytest

from geotrain.bench import codecs, figures, messages
from geotrain.codecs import get_codec
from geotrain.errors import GeotrainError
from geotrain.graph.serial import tensor_spec


def test_figures_are_those_of_the_codec() -> None:
    tensors = messages(2, 16, 64, "float32")
    lossless, rough = figures(get_codec("identity"), tensors, 1), figures(get_codec("hd4"), tensors, 1)
    assert (lossless.bytes_per_element, lossless.factor, lossless.error, lossless.bias) == (4.0, 0.5, 0.0, 0.0)
    assert rough.bytes_per_element == get_codec("hd4").size_bytes(tensor_spec(tensors[0])) / (2 * 16 * 64)
    assert 0.004 < rough.error < 0.02 and abs(rough.bias) < 0.01
    assert rough.both_mb_per_s < min(rough.encode_mb_per_s, rough.decode_mb_per_s)


def test_the_table_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "codecs.json"
    codecs(["bf16", "ecm-2"], samples=1, tokens=32, channels=64, rounds=1, json_path=path)
    text = capsys.readouterr().out
    assert "bytes/element" in text and "ecm-2 u" in text
    rows = json.loads(path.read_text())
    assert [row["codec"] for row in rows] == ["bf16", "ecm-2"] and rows[0]["bytes_per_element"] > 2


@pytest.mark.parametrize(("names", "dtype"), [(["gzip"], "float32"), (["bf16"], "float9")])
def test_what_is_not_there_is_told(names: list[str], dtype: str) -> None:
    with pytest.raises(GeotrainError, match=r"gzip|float9"):
        codecs(names, samples=1, tokens=4, channels=16, dtype=dtype, rounds=1)
