"""The command line: each mistake is one line that says what and what to do, with exit code 2, within 20 s; and the
story of a run from `coordinator` and `join` to `export`, `generate` and `--resume`."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch

JOB = """
[run]
name = "tiny"
dir = "{folder}/runs"
[model]
layers = 2
hidden = 32
heads = 2
context = 32
[data]
{data}
[train]
steps = {steps}
microbatches = 2
microbatch_size = 2
[pipeline]
peers = {peers}
"""


def command(*words: object) -> list[str]:
    return [sys.executable, "-u", "-m", "geotrain", *map(str, words)]


def run(folder: Path, *words: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def job(folder: Path, text: str = JOB, **values: object) -> Path:
    path = folder / "job.toml"
    given = {"folder": folder, "data": "", "steps": 3, "peers": 2, **values}
    path.write_text(text.format(**given))
    return path


@contextlib.contextmanager
def coordinator(folder: Path, *words: object):
    """A running coordinator and the ticket that it printed."""
    process = subprocess.Popen(
        command("coordinator", *words, "--host", "127.0.0.1", "--port", "0"),
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if match := re.search(r"gt1-\S+", line):
                yield process, match.group()
                break
        else:
            raise AssertionError("no ticket: " + "".join(seen))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def joined(folder: Path, ticket: str, *names: str):
    words = [command("join", ticket, "--name", n, "--threads", 1, "--host", "127.0.0.1", "--memory", 1) for n in names]
    processes = [
        subprocess.Popen(w, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for w in words
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def bad_ticket() -> str:
    from geotrain.identity import Ticket, new_token

    return str(Ticket("tiny", ("127.0.0.1:1",), new_token()))


BAD = {
    "no job file": (["coordinator", "absent.toml"], r"absent\.toml"),
    "malformed TOML": (["coordinator", "{malformed}"], r"line 2|TOML"),
    "unknown key": (["coordinator", "{unknown}"], r"stepps.*steps"),
    "wrong type": (["coordinator", "{wrong}"], r"steps"),
    "missing text": (["coordinator", "{missing}"], r"nowhere\.txt"),
    "empty text": (["coordinator", "{empty}"], r"empty"),
    "model not captured": (["coordinator", "{branch}"], r"where"),
    "no folder for figures": (["coordinator", "{tiny}", "--json", "nowhere/x.json"], r"no folder nowhere; make it"),
    "no folder for the demo's": (["demo", "--json", "nowhere/x.json"], r"no folder nowhere; make it"),
    "no folder for a run's": (["run", "{tiny}", "--json", "nowhere/x.json"], r"no folder nowhere; make it"),
    "a folder for figures": (["bench", "codecs", "int8", "--json", "."], r"is a folder; name a file"),
    "no topology": (["demo", "--topology", "absent.toml"], r"absent\.toml"),
    "too many peers": (["demo", "--peers", "50"], r"50|6"),
    "not a ticket": (["join", "gt1-nonsense"], r"ticket"),
    "nobody there": (["join", "{ticket}"], r"coordinator"),
    "duty out of range": (["join", "{ticket}", "--duty", "7"], r"^geotrain: join: duty"),
    "no run": (["export", "absent", "out"], r"absent"),
    "nothing to resume": (["coordinator", "--resume", "absent"], r"absent"),
    "unknown option": (["demo", "--stepps", "3"], r"stepps"),
    "unknown verb": (["dmeo"], r"dmeo"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(tmp_path, case):
    words, pattern = BAD[case]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "model.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = torch.nn.Embedding(256, 4)\n\n    def forward(self, tokens, labels):\n"
        "        y = self.linear(tokens).sum()\n        return y if y > 0 else -y\n\n\ndef make():\n    return Net()\n"
    )
    files = {
        "malformed": "[run]\nname =\n",
        "unknown": "[train]\nstepps = 3\n",
        "wrong": '[train]\nsteps = "many"\n',
        "missing": '[data]\nkind = "text"\npath = "nowhere.txt"\n',
        "empty": '[data]\nkind = "text"\npath = "empty.txt"\n',
        "tiny": "[train]\nsteps = 2\n",
        "branch": '[model]\nkind = "factory"\nfactory = "model.py:make"\n',
    }
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    names = {name: f"{name}.toml" for name in files} | {"ticket": bad_ticket()}
    start = time.monotonic()
    done = run(tmp_path, *[word.format(**names) for word in words])
    assert time.monotonic() - start < 20
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("geotrain: "), done.stderr
    assert re.search(pattern, lines[0]), lines[0]
    assert "Traceback" not in done.stdout + done.stderr


def test_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(tmp_path, "coordinator", job(tmp_path), "--host", "127.0.0.1", "--port", taken.getsockname()[1])
    assert done.returncode == 2 and "another port" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert "captured" not in done.stdout, "told before the work"


def test_too_few_peers(tmp_path):
    done = run(tmp_path, "coordinator", job(tmp_path), "--host", "127.0.0.1", "--port", 0, "--wait", 2)
    assert done.returncode == 2 and "of 2" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_plan_that_does_not_fit_is_refused(tmp_path):
    path = job(tmp_path)
    topology = tmp_path / "net.toml"
    topology.write_text('peer = [{name = "a", flops = 1e9, memory_gib = 1}, {name = "b", flops = 1e9, memory_gib = 1}]')
    assert run(tmp_path, "plan", path, "--topology", topology).returncode == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["stages"][1]["first_op"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with coordinator(tmp_path, path, "--plan", "plan.json") as (process, ticket), joined(tmp_path, ticket, "a", "b"):
        output = process.stdout.read()
        assert process.wait(20) == 2
    assert re.search(r"geotrain: .*op", output), output


def test_a_wrong_token_is_refused(tmp_path):
    from dataclasses import replace

    from geotrain.identity import Ticket, new_token

    with coordinator(tmp_path, job(tmp_path)) as (_, ticket):
        forged = str(replace(Ticket.parse(ticket), token=new_token()))
        done = run(tmp_path, "join", forged, "--host", "127.0.0.1")
    assert done.returncode == 2 and "refuses" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_from_coordinator_to_export_and_resume(tmp_path):
    path = job(tmp_path, steps=4)
    with coordinator(tmp_path, path) as (process, ticket), joined(tmp_path, ticket, "anna", "ben") as peers:
        output = process.stdout.read()
        assert process.wait(60) == 0, output
        assert [peer.wait(20) for peer in peers] == [0, 0]
    assert "held-out loss" in output
    folder = tmp_path / "runs" / "tiny"
    assert run(tmp_path, "export", folder, "out").returncode == 0
    exported = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert any("blocks.1" in name for name in exported)
    text = run(tmp_path, "generate", folder, "The ", "--tokens", 5)
    assert text.returncode == 0 and text.stdout.startswith("The ")
    again = run(tmp_path, "coordinator", path, "--host", "127.0.0.1", "--port", 0)
    assert again.returncode == 2 and "run" in again.stderr


def test_a_volunteer_leaves_with_ctrl_c_and_the_run_goes_on(tmp_path):
    path = job(tmp_path, steps=400)
    with coordinator(tmp_path, path) as (process, ticket), joined(tmp_path, ticket, "anna", "ben") as peers:
        at_work = None
        for line in process.stdout:
            at_work = at_work or re.match(r"plan 1 .*stage 0 on (\w+)", line)
            if re.match(r"step \d", line):
                break
        leaver = peers[["anna", "ben"].index(at_work[1])]
        leaver.send_signal(signal.SIGINT)
        output, _ = leaver.communicate(timeout=30)
        assert leaver.returncode == 0, output
        assert "leav" in output
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("plan 2"):
                break
        assert seen[-1].startswith("plan 2"), "".join(seen)
        assert process.poll() is None


def test_hugging_face_weights_of_another_dtype_are_converted_and_come_back_as_a_folder(tmp_path):
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama")
    text = '[run]\nname = "tiny"\ndir = "{folder}/runs"\n[model]\nkind = "hf"\npath = "llama"\ncontext = 32\n'
    train = "[train]\nsteps = 1\nmicrobatches = 2\nmicrobatch_size = 1\nlr = 1e-9\nweight_decay = 0.0\n"
    path = job(tmp_path, text + train)
    with coordinator(tmp_path, path) as (process, ticket), joined(tmp_path, ticket, "anna"):
        output = process.stdout.read()
        assert process.wait(60) == 0, output
    assert run(tmp_path, "export", tmp_path / "runs" / "tiny", "out").returncode == 0
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(again.state_dict()[name], tensor.float(), atol=1e-6), name
