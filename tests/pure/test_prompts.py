"""Texts continued token by token."""

import json

import pytest

from geotrain.config import parse_job
from geotrain.errors import ConfigError, RemoteProtocolError
from geotrain.jobs import open_job
from geotrain.prompts import Prompts


def prompts(tmp_path, texts, tokens=4, data=None, **model):
    job = parse_job(
        json.dumps({
            "run": {"dir": str(tmp_path)},
            "model": {"kind": "gpt", "layers": 1, "hidden": 16, "heads": 2, "context": 16, **model},
            "data": data or {"kind": "embedded"},
            "train": {"microbatch_size": 2},
            "evaluate": {"prompts": texts, "tokens": tokens},
        }), "job", tmp_path,
    )  # fmt: skip
    work = open_job(job)
    return Prompts(job, work.source, work.graph)


def test_a_pass_adds_a_token_to_as_many_texts_as_it_has_rows(tmp_path):
    made = prompts(tmp_path, ["ab", "a long text that is cut", "c"], tokens=2)
    inputs, places = made.batch()
    assert inputs["tokens"].shape == (2, 16) and places == (1, 15)
    assert bytes(inputs["tokens"][0, :3].tolist()) == b"ab\0"
    assert bytes(inputs["tokens"][1].tolist()) == b"text that is cut", "the end of what does not fit"
    made.add([ord("x"), ord("y")])
    inputs, places = made.batch()
    assert bytes(inputs["tokens"][0, :3].tolist()) == b"abx" and places == (2, 15)
    made.add([ord("x"), ord("z")])
    inputs, places = made.batch()
    assert places == (0,), "the first two have their tokens"
    made.add([ord("d")])
    made.add([ord("e")])
    assert made.batch() is None
    assert made.written() == [("ab", "xx"), ("a long text that is cut", "yz"), ("c", "de")]


def test_an_answer_ends_where_answers_do(tmp_path):
    lines = [json.dumps({"prompt": f"{i}+{i}", "response": f"{2 * i}."}) for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    data = {"kind": "instruct", "path": ["data.jsonl"], "held_out": 0, "template": "Q {prompt} A ", "end": "|"}
    made = prompts(tmp_path, ["1+1"], tokens=9, data=data)
    inputs, places = made.batch()
    assert bytes(inputs["tokens"][0, : places[0] + 1].tolist()) == b"Q 1+1 A "
    for token in "2.|":
        assert made.batch() is not None
        made.add([ord(token)])
    assert made.batch() is None and made.written() == [("1+1", "2.")]


def test_what_a_peer_says_is_checked(tmp_path):
    made = prompts(tmp_path, ["a", "b"])
    with pytest.raises(RemoteProtocolError, match="1 texts instead of 2"):
        made.add([1])
    made.add([300, 65])
    _, places = made.batch()
    assert places == (1,), "a token that the tokenizer lacks ends a text"


def test_prompts_need_text(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(2000))
    data = {"kind": "tokens", "path": ["tokens.bin"], "dtype": "uint16", "vocab": 10}
    with pytest.raises(ConfigError, match="need a job on text"):
        prompts(tmp_path, ["a"], data=data)
    with pytest.raises(ConfigError, match="is empty"):
        prompts(tmp_path, [""])


def test_without_prompts_nothing_is_written(tmp_path):
    assert prompts(tmp_path, []).batch() is None
