"""A job trained by a whole swarm on this machine, in front of a person. I/O."""

from pathlib import Path

from . import loops
from .config import JobConfig
from .coordinator import Coordinator
from .jobs import open_job, run_folder
from .local import LocalPeer, LocalPeers, read_topology, train_with
from .results import Result
from .runner import Runner


def train_here(job: JobConfig, title: str, topology: Path | None = None) -> tuple[Runner, Result]:
    """Trains with `pipeline.peers` processes; returns the view that heard all of it, and what is left.

    Args:
        topology: a TOML file of peers and links to act out; by default equal peers on the links of this machine.

    Raises:
        UserError: more peers than the topology has, or what the run itself raises.
    """
    count = job.pipeline.peers
    shape = None if topology is None else read_topology(topology).take(count)
    chosen = [LocalPeer(f"peer-{i}", device="cpu") for i in range(count)]
    if shape is not None:
        chosen = [
            LocalPeer(name, duty=peer.duty, memory_gib=peer.memory_bytes and peer.memory_bytes / 2**30, device="cpu")
            for name, peer in shape.peers.items()
        ]
    run_dir = run_folder(job)
    runner = Runner(title)
    with runner, LocalPeers(chosen, run_dir / "logs", topology) as processes:
        runner.say("the model is captured, while the peers start")
        work = open_job(job)
        for note in work.notes:
            runner.print(note)
        coordinator = Coordinator(
            work.job, graph=work.graph, source=work.source, run_dir=run_dir, weights=work.weights,
            on_event=runner.on_event, topology=shape, wait_s=60.0,
        )  # fmt: skip
        result = loops.run(runner.train(coordinator, train_with(coordinator, processes, runner.recorder)))
    return runner, result
