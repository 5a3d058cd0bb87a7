"""A pytest plugin: how each test ended, as JSON, with the type of what it raised. ``-p tests.mutations.outcomes --outcomes FILE``"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ligerformer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)


class Outcomes:
    def __init__(self, path: Path) -> None:
        self.path, self.ended = path, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[Any]:
        report = yield
        if report.failed:
            self.ended[item.nodeid] = call.excinfo.type.__name__ if call.excinfo else "?"
        else:
            self.ended.setdefault(item.nodeid, report.outcome)
        return report

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"package": ligerformer.__file__, "ended": self.ended}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))
