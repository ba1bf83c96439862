"""For all tests: where everything that they need is there (NO_SKIPS=1, as .ci/run has it), none may be left out."""

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("NO_SKIPS") == "1":
        report.outcome = "failed"
        report.longrepr = f"left out, and NO_SKIPS=1: {report.longrepr}"
    return report
