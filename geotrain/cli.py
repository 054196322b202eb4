"""The `geotrain` command. I/O. Every verb imports what it needs, so that `--help` is quick."""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .errors import GeotrainError

# Newer versions of Typer carry a copy of click: this is the one that it raises.
ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

DEFAULT_PORT = 7643
"""Where a coordinator listens unless told otherwise: the one port that its owner's router has to forward."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one PyTorch model across many odd machines and slow links.",
)


def main() -> NoReturn:
    """Run the command line. A mistake of the user's is one line and exit code 2; Ctrl+C is 130."""
    try:
        code: Any = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except GeotrainError as error:
        _say_error(str(error))
        sys.exit(2)
    except ClickException as error:
        _say_error(f"{error.format_message().rstrip('.') or 'a command is missing'}; see geotrain --help")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        _say_error("interrupted")
        sys.exit(130)


def _say_error(text: str) -> None:
    print(f"geotrain: {' '.join(text.split())}", file=sys.stderr)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 90,
    peers: Annotated[int, typer.Option(min=1, help="Peer processes to start.")] = 4,
    topology: Annotated[Path | None, typer.Option(help="TOML file of peers and links to act out.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Weights, data order and sample follow from it.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all facts of the run to this file.")] = None,
) -> int:
    """Train a small GPT on this machine: a coordinator and 4 peers on links like those between homes."""
    from .demo import demo as run

    return run(steps=steps, peers=peers, topology=topology, seed=seed, json_path=json)


@app.command()
def run(
    job: Annotated[Path, typer.Argument(help="The job, a TOML file.")],
    topology: Annotated[Path | None, typer.Option(help="TOML file of peers and links to act out.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all facts of the run to this file.")] = None,
) -> int:
    """Train a job on this machine alone, with as many peer processes as it says."""
    from .config import load_job
    from .disk import needs_folder
    from .here import train_here
    from .jobs import run_folder
    from .words import number_of

    needs_folder(json)
    settings = load_job(job)
    peers = number_of("peer", settings.pipeline.peers)
    runner, _ = train_here(settings, f"{settings.run.name}: {peers} on this machine", topology)
    return runner.finish(run_folder(settings), json_path=json)


@app.command()
def coordinator(
    job: Annotated[Path | None, typer.Argument(help="The job, a TOML file.", show_default=False)] = None,
    plan: Annotated[Path | None, typer.Option(help="Use this plan instead of making one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = DEFAULT_PORT,
    advertise: Annotated[
        list[str] | None, typer.Option(help="host:port that peers dial, if not this machine's own address.")
    ] = None,
    peers: Annotated[int | None, typer.Option(min=1, help="Peers to wait for, instead of the job's.")] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for that many peers.")] = 3600.0,
    topology: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json: Annotated[Path | None, typer.Option(help="Write all facts of the run to this file.")] = None,
) -> int:
    """Coordinate a job: print a ticket, wait for peers to join with it, train."""
    from .coordinate import coordinate

    return coordinate(
        job, plan=plan, resume=resume, host=host, port=port, advertise=advertise or [], peers=peers, wait_s=wait,
        topology=topology, json_path=json,
    )  # fmt: skip


@app.command()
def join(
    ticket: Annotated[
        str,
        typer.Argument(help="What the coordinator printed; - reads it from standard input, and leaves when that ends."),
    ],
    duty: Annotated[float, typer.Option(help="Share of the time that this machine may compute.")] = 1.0,
    memory: Annotated[float | None, typer.Option(help="GiB it may use; by default most of what is free.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps or xpu.")] = "auto",
    name: Annotated[str | None, typer.Option(help="What others see; by default made from the host's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.")] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
    advertise: Annotated[str, typer.Option(help="host:port that others dial, behind a forwarded port.")] = "",
    weights: Annotated[
        Path | None, typer.Option(help="A model on this machine, to read what else is fetched.", show_default=False)
    ] = None,
    topology: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> int:
    """Join a run and work for it until it ends. Ctrl+C: leave once the step is finished and handed over."""
    from json import dumps

    from .parent import Parent

    parent = Parent() if ticket == "-" else None

    from .config import PeerConfig
    from .local import TopologyFile
    from .peer import main as work
    from .tables import parse

    options = {
        "duty": duty, "memory_gib": memory, "device": device, "name": name, "threads": threads, "host": host,
        "port": port, "advertise": advertise, "weights": weights and str(weights),
    }  # fmt: skip
    config = parse(PeerConfig, dumps(options), "join", None)
    file = TopologyFile(topology) if topology is not None else None
    if parent is not None:
        ticket = parent.ticket()
    if file is None:
        return work(config, ticket, parent_pipe=parent is not None)
    return work(config, ticket, topology=file.topology, changed=file.changed, parent_pipe=parent is not None)


@app.command()
def plan(
    job: Annotated[
        Path | None, typer.Argument(help="The job, a TOML file; or the folder of a run.", show_default=False)
    ] = None,
    run: Annotated[
        Path | None, typer.Argument(help="Plan for the peers that this run measured.", show_default=False)
    ] = None,
    graph: Annotated[
        str | None, typer.Option(help="A model instead of a job: transformer:blocks=24,hidden=1024 or hf:DIR,seq=4096.")
    ] = None,
    topology: Annotated[
        Path | None, typer.Option("--topology", "--peers", help="TOML file of the peers to plan for, and their links.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help='Plan again after a change, such as "peer attic up 100" or "remove attic".')
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Check this plan instead of making one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the plan; of a job, plan.json by default.", show_default=False)
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw a step to this file.")] = None,
    sync_every: Annotated[
        int, typer.Option(min=0, help="Price several pipelines, too, that exchange gradients after so many steps.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the plan's figures as JSON.")] = False,
) -> int:
    """Make a plan without training: which peer runs what, and how long a step takes. It needs none of the peers."""
    from .planning import main as answer

    return answer(
        job,
        run,
        graph=graph,
        topology=topology,
        out=out,
        svg=svg,
        changes=what_if or [],
        check=check,
        sync_every=sync_every,
        as_json=json,
    )


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    topology: Annotated[
        Path | None, typer.Option(help="Write peers and links as measured to this TOML file.", show_default=False)
    ] = None,
) -> None:
    """How a run goes, or went: its step, plan, links, and what was last decided."""
    from .status import main as tell

    tell(run, topology)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write model.safetensors.")],
    adapter: Annotated[bool, typer.Option(help="Only what LoRA trained, for peft, not merged into the model.")] = False,
) -> None:
    """Write the newest checkpoint as one safetensors file, or as a Hugging Face folder if the job came from one."""
    from .trained import export as write

    print(write(run, folder, adapter=adapter))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Let the newest checkpoint continue a text."""
    from .generate import TextModel

    model = TextModel(run)
    print(prompt, end="", flush=True)
    for text in model.sample(prompt, tokens=tokens, temperature=temperature, seed=seed):
        print(text, end="", flush=True)
    print()


bench = typer.Typer(no_args_is_help=True, help="Measure parts of geotrain on this machine.")
app.add_typer(bench, name="bench")


@bench.command()
def codecs(
    names: Annotated[list[str] | None, typer.Argument(help="Which codecs; all, if none is named.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples in the tensor.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")] = 128,
    channels: Annotated[int, typer.Option(min=1, help="Channels of a token.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """What each codec does to a tensor: bytes, error, bias, and MB a second on one thread."""
    from .bench import codecs as run

    run(names or [], samples=samples, tokens=tokens, channels=channels, dtype=dtype, json_path=json)
