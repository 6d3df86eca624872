"""What `make` prints when pytest itself is lost."""

from pathlib import Path

import pytest

from tests import conftest


def test_the_tests_that_run_are_named_until_pytest_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "RUNNING_FILE", str(tmp_path / "running"))
    monkeypatch.setattr(conftest, "running", {})
    for nodeid in ("a", "b"):
        conftest.pytest_runtest_logstart(nodeid)
    conftest.pytest_runtest_logfinish("a")
    conftest.pytest_runtest_logstart("c")
    assert (tmp_path / "running").read_text().split() == [
        *["lost", "while", "it", "ran:", "b", "lost", "while", "it", "ran:", "c"]
    ]
    conftest.pytest_sessionfinish()
    assert not (tmp_path / "running").exists()
