"""The end of a test run says which tests were skipped, why, and how to have them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tests.conftest import PROJECT, pytest_terminal_summary

REASON = re.compile(r'(?:reason=|pytest\.skip\()(f?"[^"]*")')


def test_a_suite_without_chromium_says_in_one_line_what_it_left_out_and_how_to_have_it() -> None:
    reason, root = "Skipped: needs Chromium (apt-get install chromium)", "Skipped: needs root on Linux (use sudo)"
    skips = [
        ("tests/a.py::one", reason),
        ("tests/a.py::two", reason),
        ("tests/b.py::x[1]", reason),
        ("tests/c.py::y", root),
    ]
    reports = [SimpleNamespace(nodeid=test, longrepr=("file", 1, words)) for test, words in skips]
    lines: list[str] = []
    pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append))
    assert lines == [
        "3 skipped: needs Chromium (apt-get install chromium): 2 in tests/a.py, 1 in tests/b.py",
        "1 skipped: needs root on Linux (use sudo): 1 in tests/c.py",
    ]


def test_every_reason_to_skip_a_test_says_how_to_have_it() -> None:
    reasons = [
        (file.name, reason)
        for file in sorted((PROJECT / "tests").rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"skip\(|skipif\(|importorskip\(", line)
        for reason in REASON.findall(line)
    ]
    assert len(reasons) >= 8
    without = [(name, reason) for name, reason in reasons if "(" not in reason]
    if without:
        pytest.fail(f"no remedy in parentheses: {without}")
