"""What never changes crosses a link once: the cache of fetched tensors, cut off, damaged and shared."""

import asyncio
import hashlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from geotrain.cache import LocalWeights, TensorCache, fetch_tensors
from geotrain.errors import RemoteError, RemoteProtocolError
from geotrain.identity import Ticket
from geotrain.sharing import SharingService, fetch_shared
from geotrain.transports.direct import DirectTransport

TICKET = Ticket(("127.0.0.1:1",), "r", b"a token of the run")

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


def fetch(folder, server, owner="peer", local=None):
    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    left = dict(into)
    came = asyncio.run(fetch_tensors(server, left, DIGESTS, TensorCache(folder, owner, local)))
    assert not left and all(torch.equal(into[name], tensor) for name, tensor in TENSORS.items())
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


def test_what_is_in_local_weights_is_not_fetched(tmp_path):
    save_file({"here": TENSORS["b"], "other": torch.zeros(300)}, tmp_path / "model.safetensors")
    local = LocalWeights(tmp_path)
    assert fetch(tmp_path, server := Server(), local=local) == len(RAW["a"]) + len(RAW["c"])
    assert server.asked == [(["a", "c"], 0)], "of two tensors of one size, the one with other values is not taken"


def served(cache, work):
    """What `work(address)` gives, while a peer with this cache listens there."""

    async def test():
        transport = DirectTransport("ben", run="r", token=TICKET.token, on_frame=print, on_lost=print)
        address = await transport.start(SharingService(TICKET, cache).add_to)
        try:
            return await work(address)
        finally:
            await transport.close()

    return asyncio.run(test())


def test_a_peer_gives_what_it_has(tmp_path):
    """Cut off in the middle of a tensor, too; to those with the token; and nothing but tensors."""
    fetch(tmp_path / "ben", Server())
    into = {name: torch.zeros_like(TENSORS[name]) for name in "ab"}
    mine = TensorCache(tmp_path / "anna", "anna")
    mine.write(DIGESTS["b"], 0, memoryview(RAW["b"][:999]))

    async def work(address):
        left = dict(into)
        source = partial(fetch_shared, address, TICKET, DIGESTS)
        came = await fetch_tensors(source, left, DIGESTS, mine)
        stranger = replace(TICKET, token=b"guess" * 4)
        for ticket, digest in ((stranger, DIGESTS["a"]), (TICKET, "../ben"), (TICKET, "0" * 64)):
            with pytest.raises(RemoteError, match="gives no weights"):
                await anext(fetch_shared(address, ticket, {"a": digest}, ["a"], 0))
        return came

    assert served(TensorCache(tmp_path / "ben", "ben"), work) == len(RAW["a"]) + len(RAW["b"]) - 999
    assert all(torch.equal(into[name], TENSORS[name]) for name in "ab")


def test_who_cannot_be_reached_gives_nothing():
    async def ask():
        with pytest.raises(RemoteError, match="nobody answers"):
            await anext(fetch_shared("127.0.0.1:9", TICKET, DIGESTS, ["a"], 0))

    asyncio.run(ask())


def test_other_bytes_than_those_of_the_plan_are_refused(tmp_path):
    async def liar(names, skip):
        yield bytes(len(RAW["a"]))

    with pytest.raises(RemoteProtocolError, match="hash differs"):
        fetch(tmp_path, liar)
    assert fetch(tmp_path, Server()) == sum(map(len, RAW.values()))
