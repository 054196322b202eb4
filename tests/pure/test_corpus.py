"""Files that numpy and json only choke on half way are refused in one line too."""

import numpy as np
import pytest

from geotrain.corpus import read_images, read_records
from geotrain.errors import DataError


def complaint(read):
    with pytest.raises(DataError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "ab\\ud800"}', "line 2: 'text' holds half a surrogate pair"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"text": ' + "9" * 6000 + "}", "line 2 is not JSON"),
    ],
    ids=["surrogate", "deep", "digits"],
)
def test_jsonl_that_no_text_comes_from(tmp_path, line, expected):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    assert expected in complaint(lambda: read_records([str(path)], ["text"]))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}')
    assert read_records([str(path)], ["text"]) == [("\N{GRINNING FACE}",)]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_an_archive_whose_arrays_are_damaged(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, images=np.random.default_rng(0).random((50, 4)), labels=np.zeros(50, int))
    damaged = bytearray(path.read_bytes())
    damaged[400:420] = bytes(255 - byte for byte in damaged[400:420])  # among the numbers of images
    path.write_bytes(damaged)
    assert "not a numpy file of plain numbers" in complaint(lambda: read_images([str(path)]))


def test_an_archive_of_objects_is_not_unpickled(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, images=np.array([{}]), labels=np.zeros(1, int))
    assert "not a numpy file of plain numbers" in complaint(lambda: read_images([str(path)]))
