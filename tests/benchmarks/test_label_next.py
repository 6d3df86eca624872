"""The comparison of chosen with random photographs, without training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import label_next
from benchmarks.label_next import CHOSEN, RANDOM, NextConfig, compare, table
from utils.common.config import parse_config

FILES = [Path(f"{number}.jpg") for number in range(10)]


def test_both_sides_begin_alike_and_only_one_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: dict[str, list[Path]] = {}

    def train_on(_: Any, __: Any, labelled: list[Path], home: Path, seed: int) -> dict[str, float]:
        trained[home.relative_to(tmp_path / f"seed{seed}").as_posix()] = list(labelled)
        score = len(labelled) / 10 + 0.02 * (home.parent.name == CHOSEN)
        return {"photographs": len(labelled), "objects": 3, "mask_map50_95": score, "box_map50_95": score}

    def choose(_: Any, home: Path, files: list[Path], labelled: list[Path], number: int) -> list[Path]:
        assert trained[home.relative_to(tmp_path / "seed7").as_posix()] == labelled
        return sorted(set(files) - set(labelled))[:number]

    monkeypatch.setattr(label_next, "train_on", train_on)
    monkeypatch.setattr(label_next, "choose", choose)
    config = parse_config(NextConfig, "", ["--data", "d.yaml", "--output", str(tmp_path)])
    spec: Any = SimpleNamespace(image_files=lambda _: FILES)
    rounds = compare(config, spec, 7)
    first, second, third = (trained[f"{RANDOM}/{number}"] for number in (2, 4, 6))
    places = [(RANDOM, 2), (RANDOM, 4), (RANDOM, 6), (CHOSEN, 4), (CHOSEN, 6)]
    assert trained.keys() == {f"{side}/{number}" for side, number in places}
    assert (second[:2], third[:4]) == (first, second)
    assert trained[f"{CHOSEN}/4"] == [*first, *sorted(set(FILES) - set(first))[:2]]
    assert len(set(trained[f"{CHOSEN}/6"])) == len(set(third)) == 6
    *_, last = table({"7": rounds}).splitlines()
    assert last.split() == ["6", "3", "3", "0.6200", "0.6000", "0.0200", "-"]
