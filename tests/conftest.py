"""One torch thread everywhere: results are compared to the last bit, and two cores are shared by many peers."""

import os

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI nothing that could run may be skipped: only what needs a CUDA device is."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    left_out = [report.nodeid for report in skipped if "cuda" not in report.keywords]
    if os.environ.get("CI") and left_out and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nskipped in CI, which is a failure: {', '.join(left_out)}")
