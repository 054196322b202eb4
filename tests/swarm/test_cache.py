"""What never changes crosses a link once: the cache of fetched tensors, cut off, damaged and shared."""

import asyncio
import hashlib

import pytest
import torch

from geotrain.cache import TensorCache, fetch_tensors
from geotrain.errors import RemoteError, RemoteProtocolError

TENSORS = {name: torch.randn(300 * (i + 1)) for i, name in enumerate("abc")}
RAW = {name: tensor.numpy().tobytes() for name, tensor in TENSORS.items()}
DIGESTS = {name: hashlib.sha256(RAW[name]).hexdigest() for name in "ab"}


class Server:
    """Gives tensors in chunks of 100 bytes; ends after `limit` bytes."""

    def __init__(self, limit=None):
        self.asked, self.limit = [], limit

    async def __call__(self, names, skip):
        self.asked.append((list(names), skip))
        data = b"".join(RAW[name] for name in names)[skip:]
        for at in range(0, len(data), 100):
            if self.limit is not None and at >= self.limit:
                return
            yield data[at : at + 100]


def fetch(folder, server, owner="peer"):
    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    came = asyncio.run(fetch_tensors(server, into, DIGESTS, TensorCache(folder, owner)))
    assert all(torch.equal(into[name], tensor) for name, tensor in TENSORS.items())
    return came


def test_the_second_time_only_the_rest_is_fetched(tmp_path):
    assert fetch(tmp_path, Server()) == sum(map(len, RAW.values()))
    assert fetch(tmp_path, again := Server(), owner="another") == len(RAW["c"])
    assert again.asked == [(["c"], 0)]


def test_what_was_cut_off_goes_on(tmp_path):
    with pytest.raises(RemoteError, match="fewer weights"):
        fetch(tmp_path, Server(limit=1800))
    left = len(RAW["b"]) + len(RAW["a"]) - 1800
    assert fetch(tmp_path, server := Server()) == left + len(RAW["c"])
    assert server.asked == [(["b", "c"], 600)]


def test_a_damaged_file_is_fetched_again(tmp_path):
    fetch(tmp_path, Server())
    (tmp_path / "tensors" / DIGESTS["a"]).write_bytes(bytes(len(RAW["a"])))
    assert fetch(tmp_path, Server()) == len(RAW["a"]) + len(RAW["c"])


def test_other_bytes_than_those_of_the_plan_are_refused(tmp_path):
    async def liar(names, skip):
        yield bytes(len(RAW["a"]))

    with pytest.raises(RemoteProtocolError, match="hash differs"):
        fetch(tmp_path, liar)
    assert fetch(tmp_path, Server()) == sum(map(len, RAW.values()))
