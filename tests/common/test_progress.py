from __future__ import annotations

import pytest

from utils.common import progress


def test_logs_get_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter(range(0, 100, 6))
    monkeypatch.setattr(progress, "monotonic", lambda: next(seconds))
    count = progress.Progress("photographs", 5)
    assert [*count("ab"), *count("cde")] == list("abcde")  # two batches of one evaluation
    assert list(progress.Progress("photographs", 3, is_shown=False)("abc")) == list("abc")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["  photographs: 2 of 5, 0.3 min left", "  photographs: 4 of 5, 0.1 min left"]
