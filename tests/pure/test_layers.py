"""Imports point one way, pure modules touch no world, and the README names every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "geotrain"

LAYERS = [
    # words
    "errors", "words", "base", "tables", "config",
    # pure
    "graph.ir", "graph.ops", "graph.serial", "graph.interpret", "graph.fake", "graph.functional", "graph.eager",
    "graph.capture", "graph.cut", "graph", "graph.init", "graph.tape", "graph.deferred", "graph.weigh", "codecs.base",
    "codecs.identity", "codecs.lossy", "codecs.noise", "codecs.tiles", "codecs.scales", "codecs.native",
    "codecs.fast", "codecs.rounded", "codecs.hadamard", "codecs.rans", "codecs.models", "codecs.native_entropy",
    "codecs.entropy", "codecs.sync", "codecs.indices", "codecs.topk", "codecs.sparse",
    "codecs.native_numbers", "codecs.numbers", "codecs.transform", "codecs.channels", "codecs.delta", "codecs.ladder",
    "codecs", "coding", "opcost",
    "cost", "blocks", "schedule", "flows", "simulator", "windows", "workload", "planner.memory", "planner.problem",
    "planner.price", "planner.tables", "planner.exact", "planner.chain", "planner.bound", "planner.heuristic",
    "planner.polish", "planner.build", "planner.explain", "planner.make", "planner.baselines", "planner.exchange",
    "planner.replicas", "planner.check", "planner", "optim", "topology", "whatif", "manifest", "wire", "meter",
    "admission", "protocol", "holdings", "layout", "links", "replan", "identity", "events", "scheduler", "runstate",
    "control", "plots", "facts", "stage", "instruct",
    # shell
    "disk", "machine", "probe", "models", "corpus", "data", "rows", "executor", "ledger", "weights", "cache",
    "pretrained", "checkpoint", "transports.base", "transports.shaping", "transports.links", "transports",
    "transports.memory", "transports.direct", "survey", "loops", "channel", "sharing", "inputs", "prompts", "transfers",
    "uploads", "runfolder", "trained", "results", "stagethread",
    # processes
    "peer", "coordinator",
    # faces
    "parent", "live", "report", "runner", "jobs", "specs", "local", "coordinate", "status", "planning", "generate",
    "here", "demo", "callbacks", "trainer", "bench", "cli", "__main__",
]  # fmt: skip

PURE = LAYERS[: LAYERS.index("disk")]
WORLD = {
    "asyncio", "concurrent", "grpc", "hivemind", "multiprocessing", "os", "queue", "random", "selectors", "signal",
    "socket", "sqlite3", "subprocess", "threading", "time",
}  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(p for p in parts if p != "__init__")
        if name:
            found[name] = path
    return found


MODULES = modules()


def imports(name: str) -> tuple[set[str], set[str]]:
    """(our modules, top-level names of others) that a module imports anywhere, type-checking blocks included."""
    path = MODULES[name]
    package = list(path.relative_to(PACKAGE).parent.parts)
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            if node.module:
                target = ".".join((*base, node.module))
                ours.update(t for a in node.names if (t := f"{target}.{a.name}") in MODULES)
                if target in MODULES:
                    ours.add(target)
            else:
                ours.update(".".join((*base, a.name)) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            others.update(a.name.split(".")[0] for a in node.names)
    return ours & MODULES.keys(), others


def test_the_list_of_layers_is_complete():
    assert sorted(LAYERS) == sorted(MODULES)


@pytest.mark.parametrize("name", LAYERS)
def test_imports_point_up_the_list(name):
    ours, _ = imports(name)
    lower = {other for other in ours if LAYERS.index(other) > LAYERS.index(name)}
    # a package's __init__ gathers what is inside it
    assert not {o for o in lower if not o.startswith(f"{name}.")}


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_no_world(name):
    _, others = imports(name)
    assert not others & WORLD


def test_grpc_and_hivemind_are_imported_where_the_connections_are():
    users = {name: imports(name)[1] for name in MODULES}
    assert {n for n, o in users.items() if "grpc" in o} <= {"channel", "sharing", "transports.direct"}
    assert {n for n, o in users.items() if "hivemind" in o} == set()
