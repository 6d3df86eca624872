"""The curves are drawn often enough, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils import preview
from utils.preview import REDRAW_S, Curves


def test_curves_are_drawn_first_last_and_every_half_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    now_s = 1000.0
    monkeypatch.setattr(preview, "read_epochs", lambda _: [])
    monkeypatch.setattr(preview, "plot_training_curves", lambda _, file: drawn.append(file))
    monkeypatch.setattr(preview.time, "monotonic", lambda: now_s)
    curves = Curves(tmp_path)
    counts = []
    for passed_s, is_last in ((0, False), (1, False), (REDRAW_S, False), (1, False), (1, True)):
        now_s += passed_s
        curves.draw(is_last)
        counts.append(len(drawn))
    assert counts == [1, 1, 2, 2, 3]
    assert set(drawn) == {tmp_path / "training_curves.png"}
