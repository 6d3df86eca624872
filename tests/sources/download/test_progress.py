"""The line that shows how far a download is."""

from __future__ import annotations

import sys

import pytest

from utils.sources.download.progress import Progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_moving_line_or_separate_lines(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr("utils.sources.download.progress.SECONDS_BETWEEN_LINES", 0.0)
    progress = Progress(4_000_000)
    progress.move_to(1_000_000)
    progress.advance(2_000_000)
    progress.note("a note")
    progress.move_to(2_000_000)  # a part that must come again
    progress.advance(2_000_000)
    progress.close()
    shown = capsys.readouterr().err
    assert progress.position == 4_000_000
    assert progress.summary().startswith("4.0 MB in ")
    assert "a note\n" in shown
    assert ("  3 of 4 MB (75 %)" in shown) != is_terminal
    assert ("4.00M" in shown) == is_terminal
