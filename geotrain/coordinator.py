"""The coordinator's process: an event loop round `control`, with run folder, data and doors. I/O."""

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import channel, control, events, protocol, runstate
from .base import COORDINATOR, PROTOCOL_VERSION, FrameKey, Peer, Plan
from .checkpoint import best_so_far, prune, set_best
from .config import JobConfig
from .data import Source
from .errors import GeotrainError, PlanError, RemoteError, RemoteProtocolError, UserError
from .graph import OpGraph
from .holdings import Holdings
from .identity import Ticket, new_token, same_token
from .inputs import Feeder
from .layout import Layout, handover, lacking
from .links import Pair, Probe
from .optim import clip_factor, lr_at
from .prompts import Prompts
from .replan import change
from .results import Result
from .runfolder import RunFolder
from .scheduler import Found, Scheduler
from .topology import Topology
from .transfers import Base, Shelf
from .transports.direct import DirectTransport
from .uploads import Uploads
from .weights import WeightStore

HEARTBEAT_S = 1.0
_TICK_S = 0.5
_ALL_LINKED = 16
"""Up to so many peers are linked with all others, whatever the plan: links that it does not use are measured too."""

_LOOKS = 8
"""A better plan is asked for again when its links are tried or its weights are there, so often at most."""

_FETCH_S = 10.0
"""Weights for a better plan are waited for twice as long as they should take, but so long at least."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Coordinator:
    """Runs one job: `start` opens the doors and gives the ticket, `run` trains, `stop` ends early.

    Args:
        graph, source, weights: the model, its microbatches, and a folder of weights (None: fresh ones).
        plan: used as long as all its peers are there, instead of one of the planner's.
        advertise: the `host:port`s in the ticket, by default the address listened on.
        wait_s: how long to wait for the job's number of peers.
        resume: go on with the run in `run_dir` from its newest checkpoint.
        on_event: is told all that happens, on the event loop's thread.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        graph: OpGraph,
        source: Source,
        run_dir: Path,
        weights: WeightStore | None = None,
        on_event: Callable[[events.RunEvent], None] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: Sequence[str] = (),
        plan: Plan | None = None,
        topology: Topology | None = None,
        keep_gradients: bool = False,
        resume: bool = False,
        wait_s: float = 600.0,
    ) -> None:
        self.job, self.graph, self.run_dir = job, graph, run_dir
        self._given_plan, self._topology = plan, topology
        self._plan_is_given = False
        self._scheduler = Scheduler(job, graph)
        self._listen, self._advertise = (host, port), tuple(advertise)
        self._on_event = on_event or (lambda event: None)
        self._source, self._weights = source, weights
        self._prompts = Prompts(job, source, graph)
        self._continued: asyncio.Future[tuple[int, ...]] | None = None
        self._token = new_token()
        self._folder = RunFolder(run_dir, job, graph, resume=resume)
        train = job.train
        settings = runstate.Settings(
            steps=train.steps,
            peers=len(plan.stages) if plan is not None else job.pipeline.peers,
            named=frozenset(stage.peer for stage in plan.stages) if plan is not None else frozenset(),
            parameters=tuple(graph.parameters),
            lr_at=lambda step: lr_at(step, train),
            clip=lambda norms: clip_factor(norms, train.clip_norm),
            tokens_per_step=source.tokens_per_microbatch * train.microbatches,
            evaluate_every=job.evaluate.every,
            evaluate_microbatches=min(job.evaluate.microbatches, source.held_out_microbatches),
            checkpoint_every=job.checkpoint.every,
            keep_best=job.evaluate.keep_best,
            patience=job.evaluate.patience,
            keep_gradients=keep_gradients,
            continues=bool(job.evaluate.prompts),
            survey=True,
            wait_s=wait_s,
        )
        step = self._folder.checkpoint.manifest.step if self._folder.checkpoint else 0
        if step > 0 and step >= settings.steps:
            raise UserError(f"the run has done all its {step} steps; raise train.steps to go on")
        self._folder.ledger.roll_back(step, epoch=0)
        now = time.monotonic()
        best = best_so_far(run_dir) if resume else None
        self._state = runstate.State(settings, now, now, done=step, checkpoint=step, best=best)
        self._checkpoints = {step: self._folder.checkpoint.path} if self._folder.checkpoint else {}
        kept = (*graph.parameters, *(n for n, b in graph.buffers.items() if b.persistent))
        losses = [row.loss for row in self._folder.ledger.commits()]
        self._result = Result(run_dir, losses, base=weights, persistent=kept, ties=graph.ties)
        self._sessions: dict[str, channel.Session] = {}
        self._waiting_room: dict[int, tuple[channel.Session, str]] = {}
        self._inbox: deque[runstate.Event] = deque()
        self._busy = self._closed = False
        self._unsaid: deque[events.RunEvent] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._layouts: dict[int, Layout] = {}
        self._proposed: Layout | None = None
        self._heard = asyncio.Event()
        self._considering = False
        self._because: list[str] = []
        self._newcomers: list[str] = []
        self._linked: list[str] = []
        self._base = Base(graph, weights)
        self._holdings = Holdings()
        self._shelf = Shelf(None, {}, self._base)
        self._uploads = Uploads(
            run_dir, self._result.gradients_dir, graph.ties, run=job.run.name, seed=job.run.seed,
            graph_hash=self._folder.graph_hash, config_digest=self._folder.config_digest,
        )  # fmt: skip

    # The doors.

    async def start(self) -> Ticket:
        """Listen. Raises `UserError` if the address cannot be had."""
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[runstate.Finish] = self._loop.create_future()
        run = self.job.run.name
        self._transport = DirectTransport(
            COORDINATOR, run=run, token=self._token, on_frame=lambda src, frame: None,
            on_lost=lambda name, reason: None, topology=self._topology,
        )  # fmt: skip
        specs = {name: self.graph.values[name].spec for name in self.graph.inputs}
        self._feeder = Feeder(
            self._source, specs, self._state.settings, self.job.train.microbatches, self._transport.send,
            self._data_failed,
        )  # fmt: skip

        def mount(server: channel.Server) -> None:
            channel.ControlService(self).add_to(server)
            self._transport.mount(server)

        try:
            self._server, port = await channel.serve(*self._listen, mount)
        except BaseException:
            self._folder.close()
            raise
        addresses = self._advertise or (f"{self._listen[0]}:{port}",)
        self.ticket = Ticket(tuple(addresses), run, self._token)
        self._emit(events.Waiting(control.who_is_here(self._state)))
        return self.ticket

    def on_hello(self, session: channel.Session, hello: protocol.Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"this run speaks protocol {PROTOCOL_VERSION}, not {hello.version}; install its version"
            )
        self._check_token(hello.run, hello.token)
        peer = Peer(hello.name, hello.flops_per_s, hello.memory_bytes)
        if not (_NAME.fullmatch(hello.name) and 0 < hello.flops_per_s < math.inf and hello.memory_bytes > 0):
            raise RemoteProtocolError("a peer has a name, a speed and memory")
        host, _, port = hello.address.rpartition(":")
        address = f"{session.host if host in ('', '0.0.0.0', '[::]') else host}:{port}"
        self._waiting_room[session.number] = session, hello.name
        self._post(runstate.Joined(session.number, peer, hello.duty, address, hello.kind[:200]))

    def on_message(self, session: channel.Session, message: protocol.FromPeer) -> None:
        name = self._name_of(session)
        if name is not None:
            if isinstance(message, protocol.Surveyed):
                member, now_s = self._state.members[name], time.monotonic()
                if message.epoch == self._state.epoch:
                    links = [replace(use, dst=name) for use in message.links]
                    self._scheduler.saw(links, self._state.survey_s, now_s, probe=True)
                self._scheduler.measured(member.peer, member.kind, message.flops_per_s, message.times)
            stage = self._state.stage_of(name)
            if isinstance(message, protocol.Loaded) and message.epoch == self._state.epoch and stage is not None:
                given = self._shelf.given(self._layout.stages[stage])
                self._holdings.has(name, (tensor.digest for tensor in given))
            if isinstance(message, protocol.Prefetched) and message.name in self._base.digests:
                self._holdings.has(name, [self._base.digests[message.name]])
            if isinstance(message, protocol.Loaded | protocol.Prefetched) and message.shared_bytes > 0:
                self._emit(events.Fetched(name, 0, 0, message.shared_bytes))
            if isinstance(message, protocol.Continued) and self._continued is not None and not self._continued.done():
                self._continued.set_result(message.tokens)
            if isinstance(message, protocol.Tried) and message.epoch == self._state.epoch:
                tried = self._scheduler.tried(message.trial)
                if tried is not None:
                    self._emit(tried)
                if tried is not None and tried.cost > tried.budget:
                    self._look_for_better()
            if isinstance(message, protocol.Progress) and stage is None:
                now_s = time.monotonic()
                links = [replace(use, dst=name) for use in message.links if use.timed_bytes > 0]
                self._scheduler.rested(name, message.flops_per_s, links, now_s - HEARTBEAT_S, now_s)
            self._post(runstate.Said(name, message))
            self._heard.set()

    def on_closed(self, session: channel.Session, reason: str) -> None:
        name = self._name_of(session)
        self._waiting_room.pop(session.number, None)
        if name is not None:
            del self._sessions[name]
            self._post(runstate.Lost(name, reason))

    async def fetch(self, request: protocol.Fetch) -> AsyncIterator[bytes]:
        self._check_token(request.run, request.token)
        if request.epoch != self._state.epoch:
            raise RemoteError(f"epoch {request.epoch} is over")
        sent = {True: 0, False: 0}  # bytes, by whether they are of the base
        began_s = time.monotonic()
        try:
            async for name, chunk in self._shelf.read(request.names, request.skip):
                sent[name in self._base.digests] += len(chunk)
                yield chunk
        finally:
            self._holdings.served(request.peer, sum(sent.values()), time.monotonic() - began_s)
            if not self._closed:
                self._emit(events.Fetched(request.peer, sent[True], sent[False]))

    async def store(self, request: protocol.Store, chunks: AsyncIterator[bytes]) -> None:
        self._check_token(request.run, request.token)
        if request.epoch != self._state.epoch:
            raise RemoteError(f"epoch {request.epoch} is over")
        await self._uploads.receive(request, chunks)

    def _check_token(self, run: str, token: bytes) -> None:
        if run != self.job.run.name or not same_token(token, self._token):
            raise RemoteError("the ticket is not of this run; use the one that its coordinator printed last")

    def _name_of(self, session: channel.Session) -> str | None:
        return next((name for name, other in self._sessions.items() if other is session), None)

    # The event loop round the reducer.

    async def run(self) -> Result:
        """Train to the end. Raises `UserError` with the reason if the run did not end as it should."""
        ticker = asyncio.create_task(self._tick())
        try:
            finish = await self._finished
        finally:
            ticker.cancel()
            await self._close()
        if finish.failed:
            raise UserError(finish.reason)
        return self._result

    def stop(self) -> None:
        """End after the running step, which is saved. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._post, runstate.UserStop())

    @property
    def phase(self) -> runstate.Phase:
        """What the run is doing."""
        return self._state.phase

    async def go_over(self, plan: Plan, reason: str) -> None:
        """Change to another plan after the running step; `reason` is told. Nothing happens if the run has changed its
        plan meanwhile. Raises `PlanError` if the peers cannot run it."""
        epoch, running = self._state.epoch, self._state.plan
        question = self._scheduler.ask(self._known(), time.monotonic())
        layout = await asyncio.to_thread(self._scheduler.lay_out, question, epoch, plan)
        if running is not None and change(running, layout.plan) == "codecs":
            taken = self._scheduler.codecs(running)
            if new := set(self._scheduler.codecs(layout.plan)) - set(taken):
                raise PlanError(f"this run's peers take no {', '.join(sorted(new))}, only {', '.join(taken)}")
        if self._state.epoch == epoch and self._state.phase == "training":
            self._proposed = layout
            self._post(runstate.Switch(epoch, layout.plan, reason))

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - last < 4 * _TICK_S:  # or it was us who slept, and the heartbeats are still unread
                self._post(runstate.Tick())
            last = now

    def _post(self, event: runstate.Event) -> None:
        """Decide and act at once; what acting brings up comes after."""
        self._inbox.append(event)
        if self._busy or self._closed:
            return
        self._busy = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                self._state, commands = control.apply(self._state, event, time.monotonic())
                try:
                    for command in commands:
                        self._execute(command)
                except GeotrainError as error:
                    self._inbox.append(runstate.Broken(str(error)))
            self._feeder.advance(self._state.done)
        except Exception as error:
            if not self._finished.done():
                self._finished.set_exception(error)
        finally:
            self._busy = False

    def _execute(self, command: runstate.Command) -> None:
        match command:
            case runstate.Welcome(number, name):
                self._sessions[name], _ = self._waiting_room.pop(number)
                self._sessions[name].send(protocol.Welcome(self.job.run.name, HEARTBEAT_S))
                self._linked = [other for other in self._linked if other != name]  # it has come anew
            case runstate.Refuse(number, reason):
                _part(self._waiting_room.pop(number)[0], reason, refused=True)
            case runstate.Dismiss(name, reason):
                if name in self._sessions:
                    _part(self._sessions.pop(name), reason)
            case runstate.Survey(epoch, names):
                roster = self._roster(names)
                for name in names:
                    member = self._state.members[name]
                    blocks = self._scheduler.to_measure(member.peer, member.kind)
                    self._sessions[name].send(protocol.Survey(epoch, roster, blocks))
            case runstate.Consider(name):
                self._introduce(name)
                self._newcomers.append(name)
                self._look_for_better()
            case runstate.Propose(epoch, peers):
                self._spawn(self._propose(epoch, peers))
            case runstate.Prepare(plan, step, None):
                self._prepare(self._layouts[plan.epoch], step)
            case runstate.Prepare(plan, step, runstate.Switch() as switch):
                self._move(plan, step, switch)
            case runstate.Adopt(plan, reason):
                self._layouts = {plan.epoch: replace(self._layout, plan=plan)}
                self._announce(self._layout, reason)
            case runstate.Feed(epoch, step):
                self._feeder.start(epoch, step, self._layout.readers())
            case runstate.Instruct(epoch, instructions):
                layout = self._layouts[epoch]
                self._uploads.expect(layout.stages, instructions)
                for name in layout.names:
                    self._say_to(name, protocol.Instruct(epoch, instructions))
            case runstate.LedgerCommit(row, losses):
                seed = self.job.run.seed
                samples = [f"{seed}/{row.step}/{i}" for i in range(len(losses))]
                self._folder.ledger.commit(row, samples, losses)
                self._result.losses.append(row.loss)
            case runstate.LedgerRollback(step, epoch):
                forgotten = self._folder.ledger.roll_back(step, epoch)
                del self._result.losses[len(self._result.losses) - forgotten :]
            case runstate.WriteCheckpoint(step):
                self._spawn(self._write(step))
            case runstate.Continue(step):
                self._spawn(self._continue(step))
            case runstate.MarkBest(step, loss):
                set_best(self.run_dir, step, loss)
            case runstate.Emit(event):
                self._emit(event)
                if isinstance(event, events.Prepared):
                    self._scheduler.prepared(time.monotonic())
                if isinstance(event, events.StepCommitted):
                    self._committed(event)
            case runstate.Finish():
                for name in list(self._sessions):
                    _part(self._sessions.pop(name), f"the run is over: {command.reason}")
                if not self._finished.done():
                    self._finished.set_result(command)

    def _spawn(self, work: Any) -> None:
        async def guarded() -> None:
            try:
                await work
            except GeotrainError as error:
                self._post(runstate.Broken(str(error)))
            except Exception as error:
                if not self._finished.done():
                    self._finished.set_exception(error)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Plans.

    async def _propose(self, epoch: int, peers: Sequence[Peer]) -> None:
        all_here = self._state.settings.named <= {peer.name for peer in peers}
        given = self._given_plan if all_here else None
        self._plan_is_given = given is not None
        self._newcomers.clear()
        try:
            question = self._scheduler.ask(self._known(peers), time.monotonic())
            self._layouts[epoch] = await asyncio.to_thread(self._scheduler.lay_out, question, epoch, given)
        except GeotrainError as error:
            self._post(runstate.PlanRefused(epoch, str(error)))
        else:
            self._post(runstate.PlanChosen(self._layouts[epoch].plan))

    def _known(self, peers: Collection[Peer] | None = None) -> list[tuple[Peer, str]]:
        """Peers with their kinds: these, or all that could work."""
        members = self._state.members.values()
        able = [member.peer.name for member in members if member.known and not member.leaving]
        names = [peer.name for peer in peers] if peers is not None else able
        return [(self._state.members[name].peer, self._state.members[name].kind) for name in names]

    @property
    def _layout(self) -> Layout:
        return self._layouts[self._state.epoch]

    def _prepare(self, layout: Layout, step: int) -> None:
        """Every stage starts from the checkpoint at `step`, or fresh."""
        self._begin(layout, "")
        self._shelf = Shelf(self._weights_at(step), self.graph.ties, self._base)
        self._tell(layout, step, [self._shelf.wanted(stage) for stage in layout.stages])

    def _move(self, plan: Plan, step: int, switch: runstate.Switch) -> None:
        """Every stage goes on with the state that the stages before it have."""
        old, proposed = self._layouts[plan.epoch - 1], self._proposed
        assert proposed is not None
        layout = replace(proposed, plan=plan)
        self._begin(layout, switch.reason, self._base.digests)
        moves, gifts = handover(old, layout, self._base.digests)
        fetch = [self._shelf.given(stage) for stage in layout.stages]
        self._tell(layout, step, fetch, moves, gifts)

    def _committed(self, event: events.StepCommitted) -> None:
        """Look at what the step took; where that is not what was planned, see whether another plan is better."""
        now_s = time.monotonic()
        deviations = self._scheduler.committed(event, now_s)
        linked = [name for name in self._linked if name in self._sessions]
        for probe in self._scheduler.probes(linked, now_s):
            self._send_test(probe)
        if deviations or self._newcomers:
            self._look_for_better(map(str, deviations))

    def _introduce(self, name: str) -> None:
        """Link a peer with all who are linked, if it joined after the plan began."""
        if name in self._linked:
            return
        linked = [other for other in self._linked if other in self._sessions]
        epoch, roster = self._state.epoch, self._roster([*linked, name])
        self._say_to(name, protocol.Release(epoch, self._state.done, roster, ()))
        for other in linked:
            self._say_to(other, protocol.Meet(epoch, {name: roster[name]}))
        self._linked = [*linked, name]

    def _look_for_better(self, because: Iterable[str] = ()) -> None:
        """Unless the user has said what the plan is, or one was found that comes after this step."""
        if self._plan_is_given or self._state.phase != "training" or self._state.switch is not None:
            return
        self._because += because
        if not self._considering:
            self._considering = True
            self._spawn(self._consider(self._state.epoch))

    async def _consider(self, epoch: int) -> None:
        """Go over to a better plan, if there is one. While the run goes on, the links that it rests on are tried, then
        the frozen weights that it needs are fetched; after each we ask again."""
        try:
            look, because = 0, list[str]()
            while True:
                look += 1
                because += self._because
                self._because = []
                newcomers = [name for name in self._newcomers if name in self._sessions]
                why = [*(f"{name} joined" for name in newcomers), *because]
                question = self._scheduler.ask(self._known(), time.monotonic())
                steps_left = self._state.settings.steps - self._state.done
                found = await asyncio.to_thread(
                    self._scheduler.better, question, self._layout, steps_left, why, self._base.digests,
                    self._holdings.digests, patient=look < _LOOKS,
                )  # fmt: skip
                if not self._trains(epoch):
                    return
                doubtful = [pair for pair in found.doubtful if {*pair} <= self._sessions.keys() & self._linked]
                if look == _LOOKS or not (doubtful or found.lacking or self._because):
                    break
                if doubtful:
                    await self._test(epoch, doubtful)
                elif found.layout is not None and found.lacking:
                    await self._prefetch(epoch, found.layout, found)
                if not self._trains(epoch):
                    return
            self._newcomers = [name for name in self._newcomers if name not in newcomers]
            if found.layout is None:
                self._scheduler.stays(question)
                self._emit(events.Considered(self._state.done, found.reason))
            else:
                self._proposed = found.layout
                self._post(runstate.Switch(epoch, found.layout.plan, found.reason))
        finally:
            self._considering = False
            self._because = []

    def _trains(self, epoch: int) -> bool:
        return (self._state.epoch, self._state.phase) == (epoch, "training")

    async def _test(self, epoch: int, pairs: Sequence[Pair]) -> None:
        """Send test frames over links, and see them arrive, or be late."""
        tests, sent_s = self._scheduler.tests(pairs), time.monotonic()
        for test in tests:
            self._send_test(test)
        while self._trains(epoch) and not self._scheduler.answered(tests, sent_s, time.monotonic()):
            self._heard.clear()
            await self._heard.wait()

    async def _prefetch(self, epoch: int, layout: Layout, found: Found) -> None:
        """Let peers fetch what they lack, until they have it, it takes too long, or something else has changed."""
        who = " and ".join(found.lacking)
        self._emit(
            events.Considered(self._state.done, f"the weights for another one go to {who} first; {found.reason}")
        )
        for stage, name in zip(layout.stages, layout.names, strict=True):
            tensors = tuple(t for t in self._shelf.given(stage) if t.name in found.lacking.get(name, ()))
            if tensors:
                self._say_to(name, protocol.Prefetch(epoch, tensors, self._holders(name, tensors)))
        until_s = time.monotonic() + max(_FETCH_S, 2 * found.copy_s)
        while self._trains(epoch) and not self._because and time.monotonic() < until_s:
            if not lacking(layout, self._base.digests, self._holdings.digests):
                return
            self._heard.clear()
            await self._heard.wait()
        for name in found.lacking:
            self._say_to(name, protocol.Prefetch(epoch, (), ()))

    def _say_to(self, name: str, message: protocol.FromCoordinator) -> None:
        if name in self._sessions:
            self._sessions[name].send(message)

    def _send_test(self, test: Probe) -> None:
        self._sessions[test.src].send(protocol.Probe(self._state.epoch, test.dst, test.nbytes))

    def _begin(self, layout: Layout, reason: str, given: Collection[str] | None = None) -> None:
        self._layouts = {layout.plan.epoch: layout}
        self._uploads.abort()
        self._feeder.stop()
        self._shelf.close()
        self._shelf = Shelf(None, {}, self._base)
        self._announce(layout, reason, given)
        self._transport.set_roster(layout.plan.epoch, self._roster(layout.names), _refuse_frames)

    def _announce(self, layout: Layout, reason: str, given: Collection[str] | None = None) -> None:
        plan, now_s = layout.plan, time.monotonic()
        question = self._scheduler.ask(self._known(), now_s)
        timeline = self._scheduler.began(layout, question, now_s, given)
        self._folder.write_plan(plan)
        ops = tuple(stage.end_op - stage.first_op for stage in plan.stages)
        self._emit(
            events.Planned(
                plan, ops, layout.blocks, self.graph.num_parameters, reason, timeline.step_seconds, timeline.why,
                timeline.loads, question.peers_by_flops(), question.links,
                self._scheduler.budget_shares(question, plan),
            )
        )  # fmt: skip

    def _tell(
        self,
        layout: Layout,
        step: int,
        fetch: Sequence[tuple[protocol.NamedSpec, ...]],
        moves: Sequence[tuple[protocol.Move, ...]] = (),
        gifts: Mapping[str, tuple[protocol.Gift, ...]] | None = None,
    ) -> None:
        """Tell everybody what they are in this plan, and with whom they are linked: with all, while that is few."""
        plan, job, given = layout.plan, self.job, gifts or {}
        everybody = self._state.members
        self._linked = list(everybody if len(everybody) <= _ALL_LINKED else {*layout.names, *given})
        roster = self._roster(self._linked)
        for i, stage in enumerate(plan.stages):
            holders = self._holders(stage.peer, fetch[i])
            message = protocol.Prepare(
                plan.epoch, step, i, layout.graphs[i], layout.actions[i], job.train.model_dump_json(), job.run.seed,
                layout.names, roster, fetch[i], holders, moves[i] if moves else (),
                given.get(stage.peer, ()), stage.codec_forward, stage.codec_backward,
                self._scheduler.codecs(plan), stage.recompute,
            )  # fmt: skip
            self._sessions[stage.peer].send(message)
        for name in self._linked:
            if name not in layout.names:
                self._say_to(name, protocol.Release(plan.epoch, step, roster, given.get(name, ())))

    def _holders(self, name: str, tensors: Sequence[protocol.NamedSpec]) -> tuple[protocol.Holder, ...]:
        addresses = self._roster(self._state.members)
        links = self._scheduler.links(addresses, time.monotonic())
        return self._holdings.holders(name, tensors, addresses, links)

    def _roster(self, names: Collection[str]) -> dict[str, str]:
        return {name: self._state.members[name].address for name in names}

    def _weights_at(self, step: int) -> WeightStore | None:
        if step > 0:
            return WeightStore(self._checkpoints[step])
        return None if self._weights is None else self._weights.reopen()

    # Texts.

    async def _continue(self, step: int) -> None:
        """Pass by pass, each as the evaluation of another step, so that frames are told apart."""
        epoch, layout = self._state.epoch, self._layout
        while (batch := self._prompts.batch()) is not None:
            inputs, places = batch
            self._continued = self._loop.create_future()
            for name in layout.names:
                self._say_to(name, protocol.Instruct(epoch, (protocol.Continue(step, places),)))
            await self._feeder.deliver(FrameKey(epoch, step, 0, "", "E"), inputs, layout.readers())
            self._prompts.add(await self._continued)
            step += 1
        self._post(runstate.Continued(tuple(self._prompts.written())))

    async def _write(self, step: int) -> None:
        path = await self._uploads.finish(step)
        self._checkpoints[step] = path
        self._result.checkpoint = path
        await asyncio.to_thread(prune, self.run_dir, self.job.checkpoint.keep)
        self._post(runstate.CheckpointWritten(step, path, sum(file.stat().st_size for file in path.iterdir())))

    # What happens is told.

    def _emit(self, event: events.RunEvent) -> None:
        """Log and tell, but after the instructions that are queued by now have left."""
        self._unsaid.append(event)
        self._loop.call_soon(self._say)

    def _say(self) -> None:
        while self._unsaid:
            event = self._unsaid.popleft()
            if isinstance(event, events.Evaluated):
                self._result.held_out[event.step] = event.loss
            self._folder.log(event)
            self._on_event(event)

    def _data_failed(self, error: Exception) -> None:
        self._post(runstate.Broken(f"the data cannot be read: {error}"))

    async def _close(self) -> None:
        self._closed = True
        self._feeder.stop()
        self._uploads.abort()
        for task in self._tasks:
            task.cancel()
        self._say()
        await self._server.stop(2.0)  # seconds for the last messages to leave
        await self._transport.close()
        self._shelf.close()
        self._folder.close()


def _part(session: channel.Session, reason: str, refused: bool = False) -> None:
    session.send(protocol.Leave(reason, refused))
    session.close()


def _refuse_frames(*_: object) -> None:
    raise RemoteProtocolError("the coordinator takes no frames")
