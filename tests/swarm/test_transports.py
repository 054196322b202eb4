"""One behaviour suite for every transport; then what only sockets and shaping show."""

import asyncio
import hmac
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import msgpack
import pytest
import torch
from torch import Tensor

from geotrain.base import COORDINATOR, PROTOCOL_VERSION, Frame, FrameKey, TensorSpec
from geotrain.codecs.identity import from_raw, raw
from geotrain.errors import PeerLost, RemoteProtocolError, UserError
from geotrain.graph.serial import tensor_spec
from geotrain.topology import Topology, parse
from geotrain.transports import links
from geotrain.transports.direct import DirectTransport
from geotrain.transports.links import StreamTransport, _Hello
from geotrain.transports.memory import MemoryNetwork, MemoryTransport

RUN, TOKEN = "some-run", b"a shared secret!"


def frame_of(tensor: Tensor | None, microbatch: int = 0, epoch: int = 1, value: str = "x") -> Frame:
    key = FrameKey(epoch, 0, microbatch, value, "F" if tensor is not None else "B")
    if tensor is None:
        return Frame(key, "identity", TensorSpec((), "float32"), [], absent=True)
    payload = raw(tensor)
    return Frame(key, "identity", tensor_spec(tensor), list(payload))


def tensor_of(frame: Frame) -> Tensor:
    payload = frame.payload[0] if frame.payload else memoryview(b"")
    tensor = from_raw(payload, frame.spec, torch.device("cpu"))
    return tensor


class Member:
    """A transport, and what it was told."""

    def __init__(self, make: Callable[..., StreamTransport], name: str, **options: Any) -> None:
        self.frames: list[tuple[str, Frame]] = []
        self.arrived_s: list[float] = []
        self.lost: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        given = {"run": RUN, "token": TOKEN} | options
        self.transport = make(name, on_frame=self._on_frame, on_lost=self._on_lost, **given)

    def _on_frame(self, src: str, frame: Frame) -> None:
        self.frames.append((src, frame))
        self.arrived_s.append(time.monotonic())
        self.changed.set()

    def _on_lost(self, name: str, reason: str) -> None:
        self.lost.append((name, reason))
        self.changed.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def send(self, dst: str, frame: Frame) -> None:
        await asyncio.wait_for(self.transport.send(dst, frame), 15.0)


def welcome(*_: object) -> None:
    """Admits everything."""


class Members(dict[str, Member]):
    """Transports of one kind with their addresses."""

    def __init__(self, make: Callable[..., StreamTransport]) -> None:
        self._make = make
        self.addresses: dict[str, str] = {}

    async def add(self, *names: str, **options: Any) -> None:
        for name in names:
            self[name] = Member(self._make, name, **options)
            self.addresses[name] = await self[name].transport.start()

    def link(self, epoch: int = 1, admit: Callable[..., None] = welcome) -> None:
        for member in self.values():
            member.transport.set_roster(epoch, self.addresses, admit)


Body = Callable[[Members], Awaitable[None]]


def run_with(make: Callable[..., StreamTransport], body: Body) -> None:
    async def main() -> None:
        members = Members(make)
        try:
            async with asyncio.timeout(50):
                await body(members)
        finally:
            for member in members.values():
                await member.transport.close()

    asyncio.run(main())


@pytest.fixture(params=["memory", "direct"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs a body on one kind of transport after the other."""

    def runner(body: Body) -> None:
        network = MemoryNetwork()
        kinds: Mapping[str, Callable[..., StreamTransport]] = {
            "memory": lambda *args, **options: MemoryTransport(*args, network=network, **options),
            "direct": DirectTransport,
        }
        run_with(kinds[request.param], body)

    return runner


Run = Callable[[Body], None]

TENSORS = [
    torch.randn(3, 5),
    torch.randn(7, dtype=torch.float64),
    torch.randn(4, 6).to(torch.bfloat16),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.arange(11, dtype=torch.uint8),
    torch.randn(4, 6).t(),
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(5, 1).expand(5, 300),
    torch.randn(4, 24)[:, 8:16],
    torch.randn(3 * 1024 * 1024 // 4 + 17),
]


def test_tensors_arrive_bit_for_bit_in_both_directions(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("attic", "kitchen")
        members.link()
        for src, dst in (("attic", "kitchen"), ("kitchen", "attic")):
            for i, tensor in enumerate(TENSORS):
                await members[src].send(dst, frame_of(tensor, i))
            await members[dst].until(lambda dst=dst: len(members[dst].frames) == len(TENSORS))
            for i, (came_from, frame) in enumerate(members[dst].frames):
                tensor = tensor_of(frame)
                assert came_from == src and frame.key.microbatch == i
                assert tensor.dtype == TENSORS[i].dtype and tensor.stride() == TENSORS[i].stride()
                assert torch.equal(tensor, TENSORS[i])

    run(body)


def test_a_received_tensor_is_writable_and_its_own(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        for i in range(2):
            await members["a"].send("b", frame_of(torch.ones(100), i))
        await members["b"].until(lambda: len(members["b"].frames) == 2)
        first, second = (tensor_of(frame) for _, frame in members["b"].frames)
        first.mul_(5)
        assert second.sum() == 100 and first.sum() == 500
        assert first.data_ptr() % 64 == 0  # as torch aligns, or kernels could round differently

    run(body)


def test_an_absent_tensor_arrives_as_absent(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        await members["b"].send("a", frame_of(None))
        await members["a"].until(lambda: bool(members["a"].frames))
        assert members["a"].frames[0][1].absent and not members["a"].frames[0][1].payload

    run(body)


def test_frames_of_one_link_arrive_in_the_order_of_sending(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b", "c")
        members.link()
        sizes = [1, 700_000, 3, 300_000, 0, 5, 400_000, 1] * 5
        sends = [members["a"].send("b", frame_of(torch.ones(n), i)) for i, n in enumerate(sizes)]
        others = [members["c"].send("b", frame_of(torch.ones(n), 100 + i)) for i, n in enumerate(sizes)]
        await asyncio.gather(*sends, *others)
        await members["b"].until(lambda: len(members["b"].frames) == 2 * len(sizes))
        for src, first in (("a", 0), ("c", 100)):
            order = [frame.key.microbatch for came_from, frame in members["b"].frames if came_from == src]
            assert order == [first + i for i in range(len(sizes))]

    run(body)


def test_state_that_moves_leaves_while_nothing_else_waits(run: Run) -> None:
    def moving(number: int) -> Frame:
        return replace(frame_of(torch.ones(20_000), number), key=FrameKey(1, 0, number, "x", "M"))

    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        frames = [moving(0), moving(1), frame_of(torch.ones(20_000), 2), moving(3), frame_of(torch.ones(3), 4)]
        await asyncio.gather(*(members["a"].send("b", frame) for frame in frames))
        await members["b"].until(lambda: len(members["b"].frames) == len(frames))
        assert [frame.key.microbatch for _, frame in members["b"].frames] == [2, 4, 0, 1, 3]

    run(body)


def test_send_before_the_other_side_has_its_roster_waits_for_it(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b")
        for late, early in (("b", "a"), ("a", "b")):
            epoch = 1 if late == "b" else 2
            members[early].transport.set_roster(epoch, members.addresses, welcome)
            send = asyncio.create_task(members[early].send(late, frame_of(torch.ones(3), epoch=epoch)))
            await asyncio.sleep(0.1)
            assert not send.done()
            members[late].transport.set_roster(epoch, members.addresses, welcome)
            await send
            await members[late].until(lambda late=late: bool(members[late].frames))

    run(body)


def test_a_new_epoch_drops_what_was_sent_in_the_old_one(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        await members["a"].send("b", frame_of(torch.ones(3)))
        await members["b"].until(lambda: bool(members["b"].frames))
        members.link(epoch=2)
        with pytest.raises(PeerLost, match="epoch 1"):
            await members["a"].send("b", frame_of(torch.ones(3)))
        await members["b"].send("a", frame_of(torch.ones(3), epoch=2))
        await members["a"].until(lambda: bool(members["a"].frames))
        assert [frame.key.epoch for _, frame in members["b"].frames] == [1]
        assert members["a"].lost == []  # both moved on; nobody is lost

    run(body)


def test_a_waiting_send_fails_when_the_epoch_ends(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b")
        members["a"].transport.set_roster(1, members.addresses, welcome)  # b has no roster: no link yet
        sends = [asyncio.create_task(members["a"].send("b", frame_of(torch.ones(3), i))) for i in range(3)]
        await asyncio.sleep(0.05)
        members["a"].transport.set_roster(2, members.addresses, welcome)
        for send in sends:
            with pytest.raises(PeerLost, match="epoch 1 is over"):
                await send

    run(body)


def test_a_peer_that_leaves_is_lost_once_and_sends_to_it_fail(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b", "c")
        members.link()
        for src, dst in (("a", "b"), ("b", "c"), ("a", "c")):
            await members[src].send(dst, frame_of(torch.ones(3)))
        await members["b"].transport.close()
        for name in ("a", "c"):
            await members[name].until(lambda name=name: bool(members[name].lost))
            with pytest.raises(PeerLost, match="b"):
                await members[name].send("b", frame_of(torch.ones(3)))
        await members["a"].send("c", frame_of(torch.ones(3)))
        assert [name for name, _ in members["a"].lost] == ["b"] == [name for name, _ in members["c"].lost]
        assert members["b"].lost == []  # it was b that left

    run(body)


def test_a_frame_that_is_not_admitted_costs_the_sender_its_link(run: Run) -> None:
    asked: list[tuple[Any, ...]] = []

    def admit(src: str, key: FrameKey, codec: str, spec: TensorSpec, nbytes: int, absent: bool) -> None:
        asked.append((src, key.value, codec, spec, nbytes, absent))
        if nbytes > 100:
            raise RemoteProtocolError("too large for this plan")

    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link(admit=admit)
        await members["a"].send("b", frame_of(torch.ones(25)))
        await members["b"].until(lambda: bool(members["b"].frames))
        assert asked == [("a", "x", "identity", TensorSpec((25,), "float32"), 100, False)]
        await members["a"].send("b", frame_of(torch.ones(26)))
        await members["b"].until(lambda: bool(members["b"].lost))
        await members["a"].until(lambda: bool(members["a"].lost))
        assert members["b"].lost == [("a", "too large for this plan")] and len(members["b"].frames) == 1

    run(body)


def test_only_who_knows_the_secret_and_the_run_is_let_in(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("host")
        await members.add("bad-token", token=b"another secret!!")
        await members.add("bad-run", run="another-run")
        members.link()
        for name, words in (("bad-token", "secret is wrong"), ("bad-run", "not host of 'another-run'")):
            await members[name].until(lambda name=name: "host" in dict(members[name].lost))
            assert words in dict(members[name].lost)["host"]
        with pytest.raises(PeerLost, match="refuses"):
            await members["bad-token"].send("host", frame_of(torch.ones(1)))
        assert members["host"].frames == [] == members["host"].lost

    run(body)


def test_a_welcome_that_begins_like_a_refusal_is_a_welcome(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hellos = (_Hello(PROTOCOL_VERSION, RUN, 1, "a", "b", i.to_bytes(16)) for i in range(10_000))
    nonce = next(hello.nonce for hello in hellos if hello.proof(TOKEN, "welcome")[:1] == b"!")
    monkeypatch.setattr(links.secrets, "token_bytes", lambda size: nonce)

    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        await members["a"].send("b", frame_of(torch.ones(1)))

    run(body)


def test_who_is_not_in_the_roster_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_ROSTER_S", 0.2)

    async def body(members: Members) -> None:
        await members.add("a", "b")
        members["b"].transport.set_roster(1, {"b": members.addresses["b"]}, welcome)
        members["a"].transport.set_roster(1, members.addresses, welcome)
        await members["a"].until(lambda: bool(members["a"].lost))
        assert "b refuses: a is not one that dials b in epoch 1" in members["a"].lost[0][1]
        with pytest.raises(PeerLost, match="nobody is not linked"):
            await members["a"].send("nobody", frame_of(torch.ones(1)))

    run(body)


@pytest.mark.parametrize("first", ["newcomer", "others"])
@pytest.mark.parametrize("name", ["a", "m", "z"])
def test_a_newcomer_is_linked_while_frames_go_on_between_the_others(run: Run, name: str, first: str) -> None:
    async def body(members: Members) -> None:
        await members.add("b", "y")
        members.link()
        await members["b"].send("y", frame_of(torch.ones(1)))
        for _ in range(2):  # it leaves, and comes anew
            await members.add(name)
            for other in (name, "b", "y") if first == "newcomer" else ("b", "y", name):
                if other == name:
                    members[name].transport.set_roster(1, members.addresses, welcome)
                else:
                    members[other].transport.add_to_roster(0, {name: "nowhere:1"})  # of an epoch that is over
                    members[other].transport.add_to_roster(1, {name: members.addresses[name]})
                await asyncio.sleep(0.1)
            for src, dst in (("b", name), (name, "b"), (name, "y"), ("y", name), ("b", "y"), ("y", "b")):
                before = len(members[dst].frames)
                await members[src].send(dst, frame_of(torch.ones(1)))
                await members[dst].until(lambda dst=dst, before=before: len(members[dst].frames) > before)
            await members[name].transport.close()
        assert {gone for other in "by" for gone, _ in members[other].lost} <= {name}

    run(body)


def test_the_coordinator_never_dials(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add(COORDINATOR, "zebra", "attic")
        addresses = {**members.addresses, "zebra": "nowhere:1", "attic": "nowhere:1"}
        members[COORDINATOR].transport.set_roster(1, addresses, welcome)
        for name in ("zebra", "attic"):
            members[name].transport.set_roster(1, members.addresses, welcome)
            await members[COORDINATOR].send(name, frame_of(torch.ones(2)))
            await members[name].until(lambda name=name: bool(members[name].frames))

    run(body)


def test_a_send_that_nobody_waits_for_leaves_the_stream_whole(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        sends = [asyncio.create_task(members["a"].send("b", frame_of(torch.ones(2**20), i))) for i in range(4)]
        await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
        for send in sends[1:3]:
            send.cancel()
        await sends[3]
        await members["b"].until(lambda: bool(members["b"].frames) and members["b"].frames[-1][1].key.microbatch == 3)
        assert members["b"].lost == []

    run(body)


def test_two_cannot_listen_at_one_address(run: Run) -> None:
    async def body(members: Members) -> None:
        await members.add("a")
        port = members.addresses["a"].rpartition(":")[2]
        options = {"port": int(port)} if port.isdigit() else {}
        with pytest.raises(UserError, match=r"cannot listen on .*in use"):
            await Members(members._make).add("a", **options)

    run(body)


def test_send_waits_while_the_receiver_does_not_read(run: Run) -> None:
    """Bytes in flight are bounded: a receiver that stops reading stops the sender."""

    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        await members["a"].send("b", frame_of(torch.ones(1)))
        await members["b"].until(lambda: bool(members["b"].frames))
        held = asyncio.Event()
        left = 0

        async def pump() -> None:
            nonlocal left
            for i in range(64):
                await members["a"].send("b", frame_of(torch.ones(2**20), i))
                left += 1

        shaper = _Held(held)
        members["b"].transport._shaper = shaper  # type: ignore[assignment]
        pumping = asyncio.create_task(pump())
        await asyncio.sleep(1.0)
        stopped_at = left
        await asyncio.sleep(0.3)
        assert left == stopped_at < 16  # of 64 frames of 4 MiB
        held.set()
        await pumping
        await members["b"].until(lambda: len(members["b"].frames) == 65)

    run(body)


class _Held:
    """Stands in for a downlink that passes nothing until it is told to."""

    def __init__(self, held: asyncio.Event) -> None:
        self._held = held

    async def into(self, src: str, nbytes: int) -> None:
        await self._held.wait()


# Shaping.

HOME = """
[[peer]]
name = "a"
up_mbit_per_s = 30
[[peer]]
name = "b"
[[peer]]
name = "c"
down_mbit_per_s = 24
[[link]]
src = "a"
dst = "b"
mbit_per_s = 24
latency_ms = 40
[[link]]
src = "b"
dst = "a"
mbit_per_s = 1000
latency_ms = 5
"""


async def timed(members: Members, flows: Mapping[tuple[str, str], int], nbytes: int) -> dict[tuple[str, str], float]:
    """Seconds from the start of all flows to each one's last arrival; `flows` gives the number of frames."""
    already = {dst: len(members[dst].frames) for _, dst in flows}
    start_s = time.monotonic()
    await asyncio.gather(
        *(
            members[src].send(dst, frame_of(torch.ones(nbytes // 4), i, value=src))
            for (src, dst), count in flows.items()
            for i in range(count)
        )
    )
    ends: dict[tuple[str, str], float] = {}
    for (src, dst), count in flows.items():
        member = members[dst]

        def came(member: Member = member, src: str = src, dst: str = dst) -> list[float]:
            new = zip(member.arrived_s[already[dst] :], member.frames[already[dst] :], strict=True)
            return [at_s for at_s, (came_from, _) in new if came_from == src]

        await member.until(lambda came=came, count=count: len(came()) == count)
        ends[src, dst] = came()[-1] - start_s
    return ends


def shaped(body: Callable[[Members, Topology], Awaitable[None]], run: Run) -> None:
    async def with_topology(members: Members) -> None:
        topology = parse(HOME)
        await members.add("a", "b", "c", topology=topology)
        members.link()
        for src, dst in (("a", "b"), ("a", "c"), ("b", "c"), ("b", "a")):
            await members[src].send(dst, frame_of(torch.ones(1)))
            await members[dst].until(lambda src=src, dst=dst: src in dict(members[dst].frames))
        await asyncio.sleep(0.1)
        await body(members, topology)

    run(with_topology)


async def takes(members: Members, flows: Mapping[tuple[str, str], int], nbytes: int, ideal_s: Sequence[float]) -> None:
    """The flows never take less than their ideal times, nor what a delay for each frame, or another's rate, would add.

    Of the upper bound the best of 4 counts, since other work on the machine adds to each.
    """
    seconds: list[float] = []
    for _ in range(4):
        seconds = list((await timed(members, flows, nbytes)).values())
        assert all(took >= 0.95 * ideal for took, ideal in zip(seconds, ideal_s, strict=True))
        if all(took <= 1.3 * ideal for took, ideal in zip(seconds, ideal_s, strict=True)):
            return
    raise AssertionError(f"{seconds} s instead of {ideal_s} s, each time")


def test_shaped_rate_and_delay(run: Run) -> None:
    async def body(members: Members, topology: Topology) -> None:
        # The delay comes once: frames follow each other while others are under way.
        await takes(members, {("a", "b"): 9}, 250_000, [9 * 250_000 / 3e6 + 0.040])
        one = (await timed(members, {("a", "b"): 1}, 4000))["a", "b"]
        assert 0.040 <= one < 0.200
        await takes(members, {("b", "a"): 30}, 1_000_000, [30 * 1_000_000 / 125e6 + 0.005])

    shaped(body, run)


def test_shared_uplink_and_downlink(run: Run) -> None:
    async def body(members: Members, topology: Topology) -> None:
        up_s = 12 * 200_000 / 3.75e6  # 30 Mbit/s for both
        await takes(members, {("a", "b"): 6, ("a", "c"): 6}, 200_000, [up_s + 0.040, up_s])
        down_s = 10 * 200_000 / 3e6  # 24 Mbit/s for both
        await takes(members, {("a", "c"): 5, ("b", "c"): 5}, 200_000, [down_s, down_s])

    shaped(body, run)


def test_link_use_tells_how_long_a_shaped_link_was_busy(run: Run) -> None:
    async def body(members: Members, topology: Topology) -> None:
        members["b"].transport.used()
        for i in range(3):
            await members["a"].send("b", frame_of(torch.ones(150_000), i))
        await members["a"].send("b", frame_of(torch.ones(10)))
        await members["b"].until(lambda: len(members["b"].frames) == 5)
        (use,) = [use for use in members["b"].transport.used() if use.src == "a"]
        assert (use.nbytes, use.timed_bytes) == (1_800_040, 1_800_000)
        assert use.timed_bytes / use.busy_s == pytest.approx(3e6, rel=0.3)
        assert 0.039 < use.delay_s < 0.1  # one clock: no offset
        assert [use.nbytes for use in members["b"].transport.used() if use.src == "a"] == [0]

    shaped(body, run)


def test_a_network_may_change_while_frames_are_under_way(run: Run) -> None:
    async def body(members: Members, topology: Topology) -> None:
        slower = parse(HOME.replace("mbit_per_s = 24\nlatency_ms = 40", "mbit_per_s = 4\nlatency_ms = 20"))
        for member in members.values():
            member.transport.reshape(slower)
        await takes(members, {("a", "b"): 3}, 50_000, [3 * 50_000 / 5e5 + 0.020])

    shaped(body, run)


# Sockets.


async def _raw_stream(address: str, first: bytes) -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream("/geotrain.Frames/Exchange")()
        await call.write(first)
        return await asyncio.wait_for(call.read(), 10)


def test_hello_of_another_version_or_of_no_sense_is_refused_with_the_reason() -> None:
    async def body(members: Members) -> None:
        await members.add("b")
        members["b"].transport.set_roster(1, {"a": "nowhere:1", **members.addresses}, welcome)
        other_version = msgpack.packb([PROTOCOL_VERSION + 1, "who", "knows"])
        for first, words in (
            (b"junk", "begins with a hello"),
            (b"\x91" * 900, "begins with a hello"),
            (b"x" * 100_000, "begins with a hello"),
            (msgpack.packb([PROTOCOL_VERSION, RUN, 1, "a", "b", b"nonce", b"proof"]), "secret is wrong"),
            (other_version, f"protocol {PROTOCOL_VERSION}, not {PROTOCOL_VERSION + 1}"),
        ):
            answer = await _raw_stream(members.addresses["b"], first)
            assert answer.startswith(b"!") and words in answer.decode()
        assert members["b"].lost == [] == members["b"].frames

    run_with(DirectTransport, body)


def test_bytes_that_are_no_frames_cost_the_link() -> None:
    async def body(members: Members) -> None:
        await members.add("b")
        members["b"].transport.set_roster(1, {"a": "nowhere:1", **members.addresses}, welcome)
        fields = [PROTOCOL_VERSION, RUN, 1, "a", "b", b"0123456789abcdef"]
        proof = hmac.digest(TOKEN, msgpack.packb(["hello", *fields]), "sha256")
        async with grpc.aio.insecure_channel(members.addresses["b"]) as channel:
            call: Any = channel.stream_stream("/geotrain.Frames/Exchange")()
            await call.write(msgpack.packb([*fields, proof]))
            assert len(await call.read()) == 32
            await call.write(os.urandom(1000))
            assert await asyncio.wait_for(call.read(), 10) == grpc.aio.EOF
        await members["b"].until(lambda: bool(members["b"].lost))
        assert members["b"].lost == [("a", "this is not a frame")]

    run_with(DirectTransport, body)


def test_it_lives_on_a_server_of_somebody_else() -> None:
    async def body(members: Members) -> None:
        host = Member(DirectTransport, COORDINATOR)
        assert isinstance(host.transport, DirectTransport)
        server = grpc.aio.server()
        host.transport.mount(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await members.add("a")
        addresses = {COORDINATOR: f"127.0.0.1:{port}", **members.addresses}
        for member in (host, members["a"]):
            member.transport.set_roster(1, addresses, welcome)
        await host.send("a", frame_of(torch.ones(5)))
        await members["a"].until(lambda: bool(members["a"].frames))
        await host.transport.close()
        start_s = time.monotonic()
        await server.stop(5.0)
        assert time.monotonic() - start_s < 2.0  # no call of ours holds it up

    run_with(DirectTransport, body)


def test_an_address_that_nobody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geotrain.transports.links.HELLO_S", 0.5)

    async def body(members: Members) -> None:
        await members.add("a")
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = f"127.0.0.1:{free.getsockname()[1]}"
        members["a"].transport.set_roster(1, {"b": where}, welcome)
        with pytest.raises(PeerLost, match=f"b does not answer at {where}"):
            await members["a"].send("b", frame_of(torch.ones(1)))
        assert members["a"].lost == [("b", f"b does not answer at {where}")]

    run_with(DirectTransport, body)


def _other_process(pipe: Any) -> None:
    async def main() -> None:
        member = Member(DirectTransport, "b")
        pipe.send(await member.transport.start())
        member.transport.set_roster(1, {"a": "nowhere:1"}, welcome)
        await asyncio.sleep(60)

    asyncio.run(main())


def test_a_killed_peer_is_lost_at_once() -> None:
    async def body(members: Members) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_other_process, args=(there,), daemon=True)
        process.start()
        try:
            address = await asyncio.wait_for(asyncio.to_thread(here.recv), 40)
            await members.add("a")
            members["a"].transport.set_roster(1, {"b": address}, welcome)
            await members["a"].send("b", frame_of(torch.ones(1)))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await members["a"].until(lambda: bool(members["a"].lost), timeout_s=3)
            with pytest.raises(PeerLost):
                await members["a"].send("b", frame_of(torch.ones(1)))
        finally:
            process.kill()
            process.join(5)

    run_with(DirectTransport, body)


def test_a_stream_carries_on_under_a_frame_key_of_another_epoch() -> None:
    """A frame of another epoch than its stream's is a breach of protocol."""

    async def body(members: Members) -> None:
        await members.add("a", "b")
        members.link()
        await members["a"].send("b", frame_of(torch.ones(1)))
        link = members["a"].transport._links["b"]
        link.epoch = 2  # a sender that is wrong about its epoch
        frame = frame_of(torch.ones(1))
        await members["a"].send("b", replace(frame, key=replace(frame.key, epoch=2)))
        await members["b"].until(lambda: bool(members["b"].lost))
        assert "another run or epoch" in members["b"].lost[0][1]

    run_with(DirectTransport, body)
