"""The control plane's doors: who gets in, who does not, and what a round trip costs."""

import asyncio
import time

import pytest

from geotrain import channel, protocol
from geotrain.base import TensorSpec
from geotrain.errors import CoordinatorLost, RemoteError, UserError
from geotrain.identity import Ticket, new_token

TOKEN = new_token()


class Host:
    """Answers every Progress with Instruct; serves one tensor; keeps uploads."""

    def __init__(self):
        self.sessions, self.heard, self.closed, self.stored = [], [], [], []

    def on_hello(self, session, hello):
        if hello.token != TOKEN:
            raise RemoteError("the ticket is not of this run")
        self.sessions.append(session)
        session.send(protocol.Welcome(hello.run, 1.0))

    def on_message(self, session, message):
        self.heard.append(message)
        if isinstance(message, protocol.Progress):
            session.send(protocol.Instruct(message.epoch, (protocol.Train(message.step),)))

    def on_closed(self, session, reason):
        self.closed.append(reason)

    async def fetch(self, request):
        if request.names != ("w",):
            raise RemoteError(f"there is no tensor {request.names[0]!r}")
        for part in (b"abc", b"def"):
            yield part

    async def store(self, request, chunks):
        if request.step == 99:
            raise RemoteError("no upload at step 99 is expected")
        self.stored.append((request, b"".join([chunk async for chunk in chunks])))


def hello(token=TOKEN):
    return protocol.Hello(1, "run", token, "anna", 1e9, 1 << 30, 1.0, ":1", "cpu")


def with_server(test):
    async def whole():
        host = Host()
        server, port = await channel.serve("127.0.0.1", 0, channel.ControlService(host).add_to)
        dialled = channel.Dialled(Ticket((f"127.0.0.1:{port}",), "run", TOKEN))
        try:
            return await asyncio.wait_for(test(host, dialled, port), 30)
        finally:
            await dialled.close()
            await server.stop(0)

    return asyncio.run(whole())


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 s")


def test_a_session_carries_messages_both_ways_and_its_end_is_noticed():
    async def test(host, dialled, port):
        assert await dialled.open(hello()) == protocol.Welcome("run", 1.0)
        await dialled.send(protocol.Progress(3, 5, "computing"))
        assert await dialled.receive() == protocol.Instruct(3, (protocol.Train(5),))
        await dialled.close()
        await until(lambda: host.closed)

    with_server(test)


def test_the_coordinator_parts():
    async def test(host, dialled, port):
        await dialled.open(hello())
        host.sessions[0].send(protocol.Leave("done"))
        host.sessions[0].close()
        assert await dialled.receive() == protocol.Leave("done")
        with pytest.raises(CoordinatorLost):
            await dialled.receive()

    with_server(test)


def test_a_wrong_token_is_refused_with_a_reason():
    async def test(host, dialled, port):
        with pytest.raises(UserError, match="refuses: the ticket is not of this run"):
            await dialled.open(hello(b"x" * 16))

    with_server(test)


def test_nobody_there_is_known_at_once():
    async def test(host, dialled, port):
        nobody = channel.Dialled(Ticket(("127.0.0.1:9",), "run", TOKEN))
        start = time.monotonic()
        with pytest.raises(CoordinatorLost, match=r"no coordinator answers at 127\.0\.0\.1:9"):
            await nobody.open(hello())
        assert time.monotonic() - start < 5
        await nobody.close()

    with_server(test)


def test_addresses_are_tried_in_order():
    async def test(host, dialled, port):
        second = channel.Dialled(Ticket(("127.0.0.1:9", f"127.0.0.1:{port}"), "run", TOKEN))
        await second.open(hello())
        assert second.address == f"127.0.0.1:{port}"
        await second.close()

    with_server(test)


def test_a_port_in_use_is_one_line():
    async def test(host, dialled, port):
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: it is in use"):
            await channel.serve("127.0.0.1", port, channel.ControlService(host).add_to)

    with_server(test)


def test_garbage_costs_the_connection_only():
    async def test(host, dialled, port):
        await dialled.open(hello())
        await dialled._call.write(b"\xff\x00garbage")
        with pytest.raises(CoordinatorLost):
            await dialled.receive()
        assert host.closed == ["a message of a kind that is not expected here"]
        other = channel.Dialled(Ticket((f"127.0.0.1:{port}",), "run", TOKEN))
        await other.open(hello())
        await other.close()

    with_server(test)


def test_tensors_go_both_ways():
    async def test(host, dialled, port):
        await dialled.open(hello())
        assert b"".join([chunk async for chunk in dialled.fetch(1, ["w"])]) == b"abcdef"
        with pytest.raises(RemoteError, match="there is no tensor 'v'"):
            [chunk async for chunk in dialled.fetch(1, ["v"])]

        async def send(write):
            await write(b"12")
            await write(b"3456")

        specs = {"w": TensorSpec((6,), "uint8")}
        await dialled.store(1, 0, 2, False, specs, send)
        (header, data) = host.stored[0]
        assert (header.step, header.tensors, data) == (2, (protocol.NamedSpec("w", specs["w"]),), b"123456")
        with pytest.raises(RemoteError, match="no upload at step 99"):
            await dialled.store(1, 0, 99, False, specs, send)

    with_server(test)


def test_a_round_trip_is_short():
    """Two of them and a commit are all that control adds to a step."""

    async def test(host, dialled, port):
        await dialled.open(hello())
        times = []
        for step in range(200):
            start = time.perf_counter()
            await dialled.send(protocol.Progress(1, step, "x"))
            await dialled.receive()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    median_s = with_server(test)
    print(f"control round trip, median of 200: {median_s * 1e6:.0f} us")
    assert median_s < 0.01
