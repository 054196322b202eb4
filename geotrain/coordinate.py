"""`geotrain coordinator`: a job for peers that join from elsewhere. I/O."""

import contextlib
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path

from . import loops
from .base import Plan
from .channel import free_port
from .config import JobConfig, load_job
from .coordinator import Coordinator
from .disk import needs_folder
from .errors import PlanError, UserError
from .identity import Ticket
from .jobs import Work, open_job, resume_job, run_folder
from .local import read_topology
from .results import Result
from .runfolder import JOB
from .runner import Runner
from .words import number_of


def coordinate(
    job_path: Path | None,
    *,
    plan: Path | None,
    resume: Path | None,
    host: str,
    port: int,
    advertise: Sequence[str],
    peers: int | None,
    wait_s: float,
    topology: Path | None,
    json_path: Path | None,
) -> int:
    """Runs a job to its end; returns the exit code. Raises `UserError`."""
    job = _job(job_path, resume, peers)
    plan_path = plan or (Path(job.pipeline.plan) if job.pipeline.plan else None)
    given = read_plan(plan_path) if plan_path is not None else None
    shape = read_topology(topology) if topology is not None else None
    needs_folder(json_path)
    port = free_port(host, port)
    run_dir = resume or run_folder(job)
    runner = Runner(f"geotrain: {job.run.name}")
    with runner:
        runner.say("the model is captured")
        work = resume_job(resume, job) if resume is not None else open_job(job)
        coordinator = Coordinator(
            work.job, graph=work.graph, source=work.source, run_dir=run_dir, weights=work.weights,
            on_event=runner.on_event, host=host, port=port, advertise=advertise or _addresses(host, port),
            plan=given, topology=shape, resume=resume is not None, wait_s=wait_s,
        )  # fmt: skip

        def drive(ticket: Ticket) -> Coroutine[None, None, Result]:
            _invite(runner, work, ticket)
            return coordinator.run()

        loops.run(runner.train(coordinator, drive))
    return runner.finish(run_dir, json_path=json_path)


def _job(path: Path | None, resume: Path | None, peers: int | None) -> JobConfig:
    if path is None and resume is None:
        raise UserError("give a job file, or --resume and the folder of a run")
    job = load_job(path or (resume or Path()) / JOB)
    if peers is None:
        return job
    return job.model_copy(update={"pipeline": job.pipeline.model_copy(update={"peers": peers})})


def read_plan(path: Path) -> Plan:
    """Raises `PlanError` with the file and what is wrong in it."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot read the plan: {error}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _invite(runner: Runner, work: Work, ticket: Ticket) -> None:
    """Tells how to join."""
    for note in work.notes:
        runner.print(note)
    wanted = number_of("peer", work.job.pipeline.peers)
    runner.print(f"{wanted} {'is' if work.job.pipeline.peers == 1 else 'are'} needed. On each machine, paste:\n")
    runner.print(f"geotrain join {ticket}\n")


def _addresses(host: str, port: int) -> list[str]:
    """What others dial: the interface that was asked for or, where that is all of them, this machine's address on
    the network, and itself for peers on this machine."""
    if host not in ("0.0.0.0", "::", ""):
        return [f"{host}:{port}"]
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # TEST-NET: nothing is sent, but the route tells our own address
        found.append(f"{probe.getsockname()[0]}:{port}")
    return [*found, f"127.0.0.1:{port}"]
