"""Job texts that break the readers below us, not only the rules of a key."""

import pytest

from geotrain.config import load_job, parse_job
from geotrain.errors import ConfigError


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, '{"a": ' * 100_000], ids=["toml", "json"])
def test_brackets_without_end(text):
    with pytest.raises(ConfigError, match=r"^job: malformed: brackets are nested too deep; remove some$"):
        parse_job(text, "job")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("names = ['x', 'x']", r"\[data\] names = .* should be two different names"),
        (
            "tokenizer = '~nobody-is-called-so/t.json'",
            r"\[data\] tokenizer = .* a user that this machine does not know",
        ),
    ],
)
def test_values_that_only_fail_later(tmp_path, line, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_job(f"[data]\n{line}", "job", tmp_path)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3")
    assert load_job(tmp_path / "job.toml").train.steps == 3
