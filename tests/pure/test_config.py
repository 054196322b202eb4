"""An empty job is a job; a wrong one is answered in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from geotrain.config import (
    EmbeddedData,
    FactoryModel,
    GptModel,
    HfModel,
    JobConfig,
    PeerConfig,
    TextData,
    dump_job,
    load_job,
    load_peer,
    parse_job,
)
from geotrain.errors import ConfigError


def complaint(text, parse=lambda text: parse_job(text, "job.toml")):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("job.toml: ")
    return message.removeprefix("job.toml: ")


def test_an_empty_file_is_a_job(tmp_path):
    (tmp_path / "job.toml").write_text("")
    job = load_job(tmp_path / "job.toml")
    assert job == JobConfig()
    assert isinstance(job.model, GptModel) and isinstance(job.data, EmbeddedData)
    assert load_peer() == PeerConfig()


def test_what_a_run_keeps_reads_back_as_the_same_job(tmp_path):
    (tmp_path / "job.toml").write_text(
        "[data]\nkind='text'\npath='a.txt'\n[train]\nbetas=[0.8, 0.9]\n[pipeline]\nplan='plan.json'"
    )
    job = load_job(tmp_path / "job.toml")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "job.json").write_text(dump_job(job))
    assert load_job(run / "job.json") == job


def test_input_paths_stand_beside_the_file(tmp_path):
    texts = {
        "hf": "[model]\nkind='hf'\npath='m'\n[data]\nkind='text'\npath=['a.txt', '/b.txt']\ntokenizer='t.json'",
        "factory": "[model]\nkind='factory'\nfactory='sub/model.py:make'\n[run]\ndir='runs'",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    job = load_job(tmp_path / "hf")
    assert isinstance(job.model, HfModel) and job.model.path == str(tmp_path / "m")
    assert isinstance(job.data, TextData) and job.data.path == (str(tmp_path / "a.txt"), "/b.txt")
    assert job.data.tokenizer == str(tmp_path / "t.json")
    job = load_job(tmp_path / "factory")
    assert isinstance(job.model, FactoryModel) and job.model.factory == str(tmp_path / "sub/model.py:make")
    assert job.run.dir == "runs"


def test_a_whole_number_is_a_float_and_nothing_else_is_converted():
    assert parse_job("[train]\nlr = 1", "job").train.lr == 1.0
    for value in ("'3'", "true", "2.0", "1979-05-27", "[3]"):
        assert "[train] steps" in complaint(f"[train]\nsteps = {value}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nstep = 3", "unknown key 'step' in [train]; did you mean 'steps'?"),
        ("[trian]\nsteps = 3", "unknown key 'trian'; did you mean 'train'?"),
        ("lr = 1e-3", "unknown key 'lr'; it belongs in [train]"),
        ("[model]\nlr = 1e-3", "unknown key 'lr' in [model] of kind 'gpt'; it belongs in [train]"),
        ("[model]\nkind = 'hf'\npath = 'm'\nlayers = 2",
         "unknown key 'layers' in [model] of kind 'hf'; it goes with kind = 'gpt'"),
        ("[checkpoint]\nxyz = 1", "unknown key 'xyz' in [checkpoint]; known are every, keep"),
        ("[model]\nkind = 'gtp'", "[model] kind = 'gtp' is none of gpt, hf, factory"),
        ("[model]\nkind = 'hf'", "[model] path is missing; add it"),
        ("train = 3", "train must be a table; write [train] and its keys below"),
        ("model = 3", "model must be a table; write [model] and its keys below"),
        ("[train]\nmicrobatches = 0", "[train] microbatches = 0 should be greater than or equal to 1"),
        ("[train]\noptimizer = 'adm'", "[train] optimizer = 'adm' should be 'adamw' or 'sgd'"),
        ("[train]\nlr = nan", "[train] lr = nan should be a finite number"),
        ("[train]\nbetas = [0.9]", "[train] betas = [0.9] has too few items"),
        ("[model]\nheads = 5", "[model] heads = 5 must divide hidden = 192"),
        ("[model]\nheads = 4\nkv_heads = 3", "[model] kv_heads = 3 must divide heads = 4"),
        ("[model]\nhidden = 12\nheads = 4", "rotary positions need an even head size"),
        ("[model]\nkind = 'factory'\nfactory = 'make'", "[model] factory = 'make' should be file.py:function"),
        ("[run]\nname = '../up'", "[run] name = '../up' should be at most 64 letters"),
        ("[data]\nkind = 'text'\npath = []", "[data] path = () should have at least 1 item"),
        ("steps = = 3", "malformed: Invalid value (at line 1, column 9)"),
    ],
)  # fmt: skip
def test_complaints(text, expected):
    assert expected in complaint(text)


def test_a_peer_file_is_checked_too(tmp_path):
    path = tmp_path / "peer.toml"
    path.write_text("duty = 0.5\nname = 'attic'")
    assert load_peer(path).duty == 0.5
    for text, expected in [("dutty = 0.5", "did you mean 'duty'?"), ("duty = 0", "duty = 0 should be greater than 0")]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
            load_peer(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such job file"):
        load_job(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_job(tmp_path)
    (tmp_path / "latin").write_bytes(b"name = '\xe9'")
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 8\)"):
        load_peer(tmp_path / "latin")


VALUES = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.text(max_size=8), st.none(),
    st.lists(st.integers(), max_size=3),
)  # fmt: skip
KEYS = st.sampled_from(
    ["run", "model", "data", "train", "steps", "lr", "betas", "kind", "path", "name", "seed", "plan", "held_out", "x"]
)
TREES = st.dictionaries(KEYS, st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=4)), max_size=4)


def job_or_line(text):
    """The job, or the one line that says why it is none; anything else that is raised fails the test."""
    try:
        return parse_job(text, "job")
    except ConfigError as error:
        return str(error)


@settings(deadline=None)
@given(TREES)
def test_any_tree_is_a_job_or_one_line(tree):
    found = job_or_line(json.dumps(tree))
    if isinstance(found, str):
        assert found.startswith("job: ") and "\n" not in found
    else:
        assert parse_job(dump_job(found), "again") == found


@given(st.text(max_size=60))
def test_any_text_is_a_job_or_one_line(text):
    found = job_or_line(text)
    assert isinstance(found, JobConfig) or "\n" not in found


def test_sections_are_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        JobConfig().train.steps = 3  # type: ignore[misc]
