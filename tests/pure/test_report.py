"""The HTML report and the JSON facts."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from geotrain import events, report
from geotrain.facts import Recorder

from . import story

VOID = {"meta", "line", "circle", "path", "rect", "br"}


class Checker(HTMLParser):
    """Collects text, and fails on tags that do not match and on anything loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe") and not {"src", "href"} & {name for name, _ in attrs}
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def page_of(facts: dict[str, Any]) -> tuple[str, str]:
    page = report.html(facts)
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return page, checker.text


def facts_of(happened: list[events.RunEvent], **more: Any) -> dict[str, Any]:
    recorder = Recorder()
    for event in happened:
        recorder(event)
    return recorder.facts(**more)


def test_report_is_one_file_that_loads_nothing_and_says_it_all():
    page, text = page_of(facts_of(story.run(), run="demo", sample="def <f>(x):", machine={"torch": "2.13"}))
    assert "http" not in page and "@import" not in page and "url(" not in page
    for words in (
        "5.500 → 3.400", "-38%", "attic → cellar", "def <f>(x):", "computing", "resting (duty cap)",
        "waiting for the gradient of h from stage 1", "2 s, 1.5 s", "attic is the slower one", "done after 10 of 10",
        "1 checkpoints", "5 MiB", "tcu-001 (16.0 times fewer bytes, error 0.002, bias -0.1%, 1 message with NaN", "25%",
        "tcm-05 (16.0 times fewer bytes, error 0.002, bias -0.1%)", "40%", "of loss budget",
    ):  # fmt: skip
        assert words in text, words
    assert page.count("<svg") == 4
    assert len(re.findall(r'class="bar F"', page)) == 2 * story.MICROBATCHES


def test_report_of_a_run_that_never_started():
    _, text = page_of(facts_of([events.Ended(0, "no peers", 1.0)]))
    assert "no peers after 0 of 0 steps" in text


def test_json_is_strict_and_complete(tmp_path: Path):
    run = story.run()
    run.insert(-3, story.committed(11, loss=math.nan, skipped=True))
    path = tmp_path / "facts.json"
    report.write_json(path, facts_of(run, plan="plan.json", report="report.html"))
    facts = json.loads(path.read_text(), parse_constant=lambda name: None)
    for key in (
        "held_out_loss_before", "held_out_loss_after", "losses", "step_seconds", "tokens_per_second", "peers",
        "stages", "links", "seconds_by_activity", "checkpoint", "plan", "report",
    ):  # fmt: skip
        assert facts[key] is not None, key
    assert facts["losses"][-1] is None and facts["skipped_steps"] == [11]
    assert "steps 11" in page_of(facts)[1]


def test_ten_thousand_steps_make_a_small_page():
    page, _ = page_of(facts_of(story.run(steps=10_000)))
    assert len(page) < 200_000
