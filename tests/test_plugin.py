"""What `make` prints when pytest itself is lost."""

from pathlib import Path

import pytest

from tests.support import plugin


def test_the_tests_that_run_are_named_until_pytest_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "RUNNING_FILE", str(tmp_path / "running"))
    monkeypatch.setattr(plugin, "running", {})
    for nodeid in ("a", "b"):
        plugin.pytest_runtest_logstart(nodeid)
    plugin.pytest_runtest_logfinish("a")
    plugin.pytest_runtest_logstart("c")
    assert (tmp_path / "running").read_text().split() == [
        *["lost", "while", "it", "ran:", "b", "lost", "while", "it", "ran:", "c"]
    ]
    plugin.pytest_sessionfinish()
    assert not (tmp_path / "running").exists()
