"""A peer's process: joins with a ticket, becomes a stage, works until it is told to leave. I/O.

The main thread is an asyncio loop with the control connection and the transport; a `StageThread` computes.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import protocol
from .admission import Admission, expectations, moved
from .base import COORDINATOR, ONCE, PROTOCOL_VERSION, Frame, FrameKey, LinkUse, TensorSpec
from .cache import LocalWeights, TensorCache, fetch_tensors
from .channel import Dialled
from .codecs import CODECS, warm_up
from .coding import Codecs, Decoder, Encoder, absent, raw_frame
from .config import PeerConfig, TrainConfig
from .errors import CoordinatorLost, GeotrainError, RemoteError, RemoteProtocolError
from .graph import StageGraph, from_bytes
from .graph.ops import to_dtype
from .graph.serial import tensor_spec
from .identity import Ticket
from .loops import run
from .machine import allocate_tightly, free_memory_bytes, kind, measured_flops_per_s, pick_device
from .probe import measure
from .replan import PATIENCE, TOLERANCE
from .sharing import SharingService, fetch_shared
from .stagethread import Held, Machine, StageThread, one_line
from .survey import LONG_BYTES, VALUE, Survey, frame_of, is_test
from .topology import Topology
from .transfers import plain
from .transports.base import Admit
from .transports.direct import DirectTransport
from .weights import tensor_chunks

_SAY_S = 10.0
"""At least so often a line says what the peer does or waits for."""

_IDLE_S = 10.0
"""A peer without a stage measures its speed so often, since it may have become of use; one that has changed is measured
again with the next heartbeats, until that is sure."""

_CHANGED_S = 0.5

_LINK_GRACE_S = 5.0
"""That a peer is gone is the coordinator's to say. Only where it still sees the peer is the link to blame."""


class PeerProcess:
    """One stay in one run. `run` returns the exit code."""

    def __init__(
        self,
        config: PeerConfig,
        ticket: Ticket,
        *,
        topology: Topology | None = None,
        changed: Callable[[], Topology | None] = lambda: None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._changed = changed
        self.name = config.name or f"{socket.gethostname().partition('.')[0][:50]}-{uuid.uuid4().hex[:4]}"
        self._config, self._ticket, self._say = config, ticket, say
        self._machine = Machine(pick_device(config.device), config.duty, config.threads)
        self._dialled = Dialled(ticket)
        local = LocalWeights(config.weights) if config.weights is not None else None
        self._cache = TensorCache(config.cache, self.name, local)
        self._transport = DirectTransport(
            self.name, run=ticket.run, token=ticket.token, on_frame=self._on_frame, on_lost=self._on_lost,
            topology=topology, host=config.host, port=config.port,
        )  # fmt: skip
        self._stage: StageThread | None = None
        self._survey: Survey | None = None
        self._coding: _Coding | None = None
        self._names: tuple[str, ...] = ()
        self._leaving = False
        self._said = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._prefetching: asyncio.Task[Any] | None = None

    async def run(self) -> int:
        """Raises `UserError` if the coordinator refuses, `CoordinatorLost` if it is not there or goes."""
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[protocol.FromPeer] = asyncio.Queue()
        speed = await asyncio.to_thread(measured_flops_per_s, self._machine.device, self._machine.threads)
        memory = self._config.memory_gib
        address = await self._transport.start(SharingService(self._ticket, self._cache).add_to)
        hello = protocol.Hello(
            PROTOCOL_VERSION, self._ticket.run, self._ticket.token, self.name, speed * self._machine.duty,
            int(memory * 2**30) if memory is not None else free_memory_bytes(self._machine.device),
            self._machine.duty, self._config.advertise or address, kind(self._machine.device, self._machine.threads),
        )  # fmt: skip
        try:
            welcome = await self._dialled.open(hello)
            self._tell(f"{self.name} has joined {welcome.run}")
            self._spawn(self._write())
            self._spawn(self._heartbeat(welcome.heartbeat_s))
            self._spawn(self._act_out())
            return await self._serve()
        finally:
            await self._close()

    def drain(self) -> None:
        """Leave when the step is finished and handed over; asked twice, at once."""
        if self._leaving:
            self._tell("leaving at once")
            os._exit(130)
        self._leaving = True
        self._tell("leaving when this step is finished and saved (again: at once)")
        self._outbox.put_nowait(protocol.Leaving())

    async def _serve(self) -> int:
        while True:
            match await self._dialled.receive():
                case protocol.Survey() as survey:
                    await self._retire()
                    self._survey = Survey(self._transport, survey.epoch, survey.roster)
                    self._spawn(self._look_around(self._survey, survey.blocks))
                case protocol.Prepare() as prepare:
                    await self._become(prepare)
                case protocol.Release() as release:
                    await self._release(release)
                case protocol.Meet(epoch, roster):
                    self._transport.add_to_roster(epoch, roster)
                case protocol.Probe(epoch, dst, nbytes):
                    frame = frame_of(epoch, 0, min(nbytes, LONG_BYTES))
                    self._spawn(self._deliver(dst, frame))
                case protocol.Prefetch() as prefetch:
                    self._stop_prefetching()
                    self._prefetching = self._spawn(self._prefetch(prefetch))
                case protocol.Instruct(epoch, instructions):
                    if self._stage is not None and self._stage.epoch == epoch:
                        self._stage.instruct(instructions)
                case protocol.Leave(reason):
                    self._tell(f"{self.name} leaves: {reason}")
                    return 0
                case protocol.Welcome():
                    raise RemoteProtocolError("a second welcome")

    async def _look_around(self, survey: Survey, blocks: Sequence[bytes]) -> None:
        links = await survey.run()
        flops_per_s, times = 0.0, ()
        if blocks:
            graphs = [graph for data in blocks if isinstance(graph := from_bytes(data), StageGraph)]
            machine = self._machine
            flops_per_s, times = await asyncio.to_thread(measure, graphs, machine.device, machine.threads)
        if self._survey is survey:
            self._survey = None  # an idle peer tells of its links and speed from now on
        self._post(protocol.Surveyed(survey.epoch, links, flops_per_s, times))

    async def _become(self, prepare: protocol.Prepare) -> None:
        held = await self._retire(bool(prepare.moves or prepare.gifts))
        stage = await asyncio.to_thread(from_bytes, prepare.graph)
        if not isinstance(stage, StageGraph):
            raise RemoteProtocolError("a whole model where a stage belongs")
        try:
            train = TrainConfig.model_validate_json(prepare.train)
        except ValueError:
            raise RemoteProtocolError("the coordinator sends training settings that this geotrain lacks") from None
        self._names = prepare.names
        sources = {move.name: move.src for move in prepare.moves if move.src != self.name}
        expected = {**expectations(stage, prepare.names), **moved(stage, sources, train)}
        unknown = set(prepare.codecs) - CODECS.keys()
        if unknown:
            raise RemoteProtocolError(f"the coordinator names codecs that this geotrain lacks: {', '.join(unknown)}")
        admission = Admission(prepare.epoch, expected, train.microbatches, prepare.codecs)
        roster = {**prepare.roster, COORDINATOR: self._dialled.address}
        self._transport.set_roster(prepare.epoch, roster, _or_test(prepare.epoch, admission.check))
        self._give(prepare.epoch, prepare.step, prepare.gifts, held)
        codecs = Codecs(prepare.codec_forward, prepare.codec_backward)
        self._coding = _Coding(stage, codecs, prepare.seed, self._machine, self._failed)
        self._stage = StageThread(prepare, stage, train, self._machine, self._send_soon, self, held)
        self._stage.start()
        self._tell(
            f"epoch {prepare.epoch}: stage {prepare.stage} of {len(prepare.names)}, {len(stage.ops)} ops; "
            "loading its weights"
        )

    async def _release(self, release: protocol.Release) -> None:
        held = await self._retire(bool(release.gifts))
        self._transport.set_roster(release.epoch, release.roster, _or_test(release.epoch, _refuse_frames))
        self._give(release.epoch, release.step, release.gifts, held)
        self._tell(f"epoch {release.epoch}: no stage; waiting for a plan")

    async def _retire(self, keep: bool = False) -> Held:
        """End the stage; returns its state, if it is to be kept."""
        self._stop_prefetching()
        stage, self._stage, self._survey = self._stage, None, None
        held: Held = {}
        if stage is not None and keep:
            held = await asyncio.to_thread(stage.finish)
        elif stage is not None:
            stage.abort()
            await asyncio.to_thread(stage.join)
        if self._coding is not None:
            self._coding.close()
            self._coding = None
        return held

    def _give(self, epoch: int, step: int, gifts: Sequence[protocol.Gift], held: Held) -> None:
        """Weights first: the others' stages begin with these, and their optimizers' state follows."""
        for gift in gifts:
            if gift.name not in held:
                raise RemoteProtocolError(f"the coordinator gives away {gift.name!r}, which is not here")
        parts = [(gift, part) for gift in gifts for part in held[gift.name]]
        for gift, part in sorted(parts, key=lambda it: it[0].name != it[1]):
            key, tensor = FrameKey(epoch, step, ONCE, part, "M"), held[gift.name][part]
            frame = absent(key) if tensor is None else raw_frame(key, tensor)
            for peer in gift.to:
                self._spawn(self._deliver(peer, frame))

    # What the stage thread asks of us.

    def post(self, message: protocol.FromPeer) -> None:
        self._loop.call_soon_threadsafe(self._post, message)

    def _post(self, message: protocol.FromPeer) -> None:
        if isinstance(message, protocol.Ready):
            links = tuple(self._transport.used())
            codecs = self._coding.encoder.take() if self._coding is not None else ()
            message = replace(message, report=replace(message.report, links=links, codecs=codecs))
        self._outbox.put_nowait(message)

    def use_codecs(self, codecs: Codecs) -> None:
        if self._coding is not None:
            self._coding.use(codecs)

    def fetch(
        self, epoch: int, into: Mapping[str, Tensor], digests: Mapping[str, str], holders: Sequence[protocol.Holder]
    ) -> concurrent.futures.Future[int]:
        work = self._fetch(epoch, dict(into), digests, holders)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _fetch(
        self, epoch: int, into: dict[str, Tensor], digests: Mapping[str, str], holders: Sequence[protocol.Holder]
    ) -> int:
        """Returns the bytes that came from other peers."""
        shared_bytes = 0
        for holder in holders:
            asked = {name: into.pop(name) for name in holder.names if name in into and name in digests}
            source = partial(fetch_shared, holder.address, self._ticket, digests)
            with contextlib.suppress(RemoteError):  # the coordinator has all
                shared_bytes += await fetch_tensors(source, asked, digests, self._cache)
            into |= asked
        await fetch_tensors(partial(self._dialled.fetch, epoch), into, digests, self._cache)
        return shared_bytes

    async def _prefetch(self, prefetch: protocol.Prefetch) -> None:
        """One after the other: the stage that runs has the memory."""
        with contextlib.suppress(RemoteError):  # they are fetched when they are needed
            for tensor in prefetch.tensors:
                memory = torch.empty(tensor.spec.shape, dtype=to_dtype(tensor.spec.dtype))
                digests = {tensor.name: tensor.digest}
                shared_bytes = await self._fetch(prefetch.epoch, {tensor.name: memory}, digests, prefetch.holders)
                self._post(protocol.Prefetched(prefetch.epoch, tensor.name, shared_bytes))

    def _stop_prefetching(self) -> None:
        if self._prefetching is not None:
            self._prefetching.cancel()
            self._prefetching = None

    def upload(
        self, epoch: int, stage: int, step: int, gradients: bool, tensors: Mapping[str, Tensor]
    ) -> concurrent.futures.Future[None]:
        work = self._upload(epoch, stage, step, gradients, tensors)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _upload(self, epoch: int, stage: int, step: int, gradients: bool, tensors: Mapping[str, Tensor]) -> None:
        specs: dict[str, TensorSpec] = {name: plain(tensor_spec(tensor)) for name, tensor in tensors.items()}

        async def send(write: Any) -> None:
            for tensor in tensors.values():
                for _, chunk in tensor_chunks(tensor, protocol.CHUNK_BYTES):
                    if len(chunk):
                        await write(bytes(chunk))

        try:
            await self._dialled.store(epoch, stage, step, gradients, specs, send)
        except GeotrainError as error:
            self._post(protocol.Failed(epoch, str(error)))
            raise
        if not gradients:
            self._post(protocol.Saved(epoch, step, stage))

    # Frames.

    def _send_soon(self, stages: list[int], key: FrameKey, tensor: Tensor | None) -> None:
        """Called by the stage thread; never waits."""
        coding = self._coding
        if coding is not None:
            names = [self._names[stage] for stage in stages]
            coding.encode(key, tensor, lambda frame: self._loop.call_soon_threadsafe(self._send, names, frame))

    def _send(self, names: list[str], frame: Frame) -> None:
        for name in names:
            self._spawn(self._deliver(name, frame))

    async def _deliver(self, name: str, frame: Frame) -> None:
        with contextlib.suppress(RemoteError):  # `on_lost` tells
            await self._transport.send(name, frame)

    def _on_frame(self, src: str, frame: Frame) -> None:
        stage, coding = self._stage, self._coding
        if self._survey is not None and self._survey.epoch == frame.key.epoch:
            self._survey.on_frame(src, frame)
        elif frame.key.value == VALUE and frame.key.direction == "M":
            pass
        elif stage is not None and coding is not None and stage.epoch == frame.key.epoch:
            coding.decode(frame, lambda tensor: stage.put(frame.key, tensor))

    def _failed(self, error: Exception) -> None:
        """Called by the codec threads."""
        if self._stage is not None:
            self.post(protocol.Failed(self._stage.epoch, one_line(error)))

    def _on_lost(self, name: str, reason: str) -> None:
        if self._survey is not None:
            self._survey.done_with(name)
        if self._stage is not None and (name in (*self._names, COORDINATOR) or self._stage.awaits(name)):
            self._loop.call_later(_LINK_GRACE_S, self._still_lost, self._stage.epoch, name, reason)

    def _still_lost(self, epoch: int, name: str, reason: str) -> None:
        if self._stage is not None and self._stage.epoch == epoch:
            self._post(protocol.Failed(epoch, f"the link to {name} is lost: {reason}"))

    # The control connection.

    async def _write(self) -> None:
        with contextlib.suppress(CoordinatorLost):
            while True:
                await self._dialled.send(await self._outbox.get())

    async def _heartbeat(self, every_s: float) -> None:
        silent_s = idle_s = last = 0.0
        again, machine = 0, self._machine
        while True:
            stage, speed, links = self._stage, 0.0, list[LinkUse]()
            doing = stage.doing if stage is not None else "waiting for a plan"
            epoch, step = (stage.epoch, stage.step) if stage is not None else (0, 0)
            if stage is not None:
                idle_s, last, again = _IDLE_S, 0.0, 0  # measured as soon as it has none
            elif self._survey is None:
                links = [use for use in self._transport.used() if use.timed_bytes]
                idle_s += every_s
                if idle_s >= _IDLE_S or again > 0:
                    idle_s = 0.0
                    flops_per_s = await asyncio.to_thread(measured_flops_per_s, machine.device, machine.threads)
                    speed = machine.duty * flops_per_s
                    changed = last > 0 and max(speed, last) > TOLERANCE * min(speed, last)
                    again = PATIENCE - 1 if changed and again == 0 else max(0, again - 1)
                    last = speed
            self._outbox.put_nowait(protocol.Progress(epoch, step, doing[:1000], speed, tuple(links)))
            silent_s += every_s
            if silent_s >= _SAY_S:
                self._tell(f"{self.name}: step {step}, {doing}")
                silent_s = 0.0
            await asyncio.sleep(every_s)

    async def _act_out(self) -> None:
        """Keep to the network as it is acted out now, and to this peer's place in it."""
        while True:
            await asyncio.sleep(_CHANGED_S)
            topology = self._changed()
            if topology is not None:
                self._transport.reshape(topology)
                if self.name in topology.peers:
                    self._machine.duty = topology.peers[self.name].duty
                if self._stage is not None and self._stage.worker is not None:
                    self._stage.worker.duty = self._machine.duty

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._say(line)

    async def _close(self) -> None:
        if self._stage is not None:
            self._stage.abort()
        if self._coding is not None:
            self._coding.close()
        for task in list(self._tasks):
            task.cancel()
        await self._transport.close()
        await self._dialled.close()


class _Coding:
    """A thread that encodes what the stage sends, and one that decodes what it receives: neither waits for compute,
    nor compute for them. What needs no work is passed on at once."""

    def __init__(
        self, stage: StageGraph, codecs: Codecs, seed: int, machine: Machine, on_error: Callable[[Exception], None]
    ) -> None:
        self.encoder = Encoder(stage, codecs, seed=seed, clock=time.monotonic)
        self.decoder = Decoder(machine.device, seed=seed)
        self._on_error = on_error
        start = None if machine.threads is None else partial(torch.set_num_threads, machine.threads)
        self._encoding, self._decoding = (
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name, initializer=start)
            for name in ("encode", "decode")
        )
        self.use(codecs)

    def use(self, codecs: Codecs) -> None:
        self._run(self._encoding, lambda: warm_up((codecs.forward, codecs.backward)))
        self.encoder.codecs = codecs

    def encode(self, key: FrameKey, tensor: Tensor | None, then: Callable[[Frame], object]) -> None:
        if tensor is None:
            then(absent(key))
            return
        codec = self.encoder.codec_for(key, tensor)
        if codec == "identity":
            then(self.encoder.encode(key, tensor, codec))
        else:
            self._run(self._encoding, lambda: then(self.encoder.encode(key, tensor, codec)))

    def decode(self, frame: Frame, then: Callable[[Tensor | None], object]) -> None:
        if frame.absent or frame.codec == "identity":
            then(self.decoder.decode(frame))
        else:
            self._run(self._decoding, lambda: then(self.decoder.decode(frame)))

    def close(self) -> None:
        for threads in (self._encoding, self._decoding):
            threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, threads: concurrent.futures.Executor, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._on_error(error)

        with contextlib.suppress(RuntimeError):  # closed: the epoch is over
            threads.submit(guarded)


def _or_test(epoch: int, admit: Admit) -> Admit:
    """Admits test frames, too; they are timed and thrown away."""

    def check(src: str, key: FrameKey, codec: str, spec: TensorSpec, nbytes: int, absent: bool) -> None:
        if not is_test(epoch, key, codec, spec, nbytes):
            admit(src, key, codec, spec, nbytes, absent)

    return check


def _refuse_frames(*_: object) -> None:
    raise RemoteProtocolError("a peer without a stage takes no frames")


def main(
    config: PeerConfig,
    ticket: str,
    *,
    topology: Topology | None = None,
    changed: Callable[[], Topology | None] = lambda: None,
    parent_pipe: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Join and work; returns the exit code. `topology` is a network to act out; `changed` gives another one when it is
    to become that. `parent_pipe`: this process was started by another of ours, which
    holds our standard input open, takes care of Ctrl+C, and takes us with it when it dies, however it dies.

    Raises `TicketError` or `UserError`, one line, if there is nothing to join.
    """
    allocate_tightly()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if parent_pipe:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_die_with_parent, daemon=True).start()
    peer = PeerProcess(config, Ticket.parse(ticket), topology=topology, changed=changed, say=say)
    return run(_run(peer, parent_pipe, say))


async def _run(peer: PeerProcess, parent_pipe: bool, say: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    if not parent_pipe:
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(signal.SIGINT, peer.drain)
            loop.add_signal_handler(signal.SIGTERM, peer.drain)
    try:
        return await peer.run()
    except RemoteError as error:
        say(f"{peer.name} stops: {error}")
        return 1


def _die_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends
            pass
    os._exit(1)
