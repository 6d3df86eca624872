"""Which photograph goes to which side, and under which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.common.errors import UserError
from utils.data.parsing.sources import Photograph
from utils.data.parsing.split import assign_splits, output_stems


def photographs(names: list[str], circuit: str = "Circuit1") -> list[Photograph]:
    return [Photograph(name, name, circuit, Path(name), None, 1, "") for name in names]


def test_adding_photographs_moves_none() -> None:
    names = [f"{circuit} ({number}).JPG" for circuit in range(10) for number in range(100)]
    few = assign_splits(photographs(names[:500]), "hash", 0.2)
    many = assign_splits(photographs(names), "hash", 0.2)
    assert all(many[key] == split for key, split in few.items())
    assert 0.17 < list(many.values()).count("val") / 1000 < 0.23
    assert assign_splits(photographs([name.upper() for name in names]), "hash", 0.2) == many


def test_neither_side_stays_empty() -> None:
    for names in (["a.jpg", "b.jpg"], ["a.jpg", "b.jpg", "c.jpg"]):
        for val_fraction in (1e-9, 1 - 1e-9):
            assert set(assign_splits(photographs(names), "hash", val_fraction).values()) == {"train", "val"}
    assert len(assign_splits(photographs(["a.jpg"]), "hash", 0.2)) == 1


def test_circuits_stay_whole_and_come_near_the_share() -> None:
    chosen = [
        item for number in range(8) for item in photographs([f"{number} ({n}).JPG" for n in range(50)], f"C{number}")
    ]
    splits = assign_splits(chosen, "circuit", 0.25)
    by_circuit = {
        item.circuit: {splits[other.key] for other in chosen if other.circuit == item.circuit} for item in chosen
    }
    assert all(len(sides) == 1 for sides in by_circuit.values())
    assert list(splits.values()).count("val") == 100


@pytest.mark.parametrize("val_fraction", [0.01, 0.5, 0.99])
def test_each_side_has_a_circuit(val_fraction: float) -> None:
    chosen = photographs(["a.jpg", "b.jpg", "c.jpg"], "C1") + photographs(["d.jpg"], "C2")
    assert set(assign_splits(chosen, "circuit", val_fraction).values()) == {"train", "val"}


def test_one_circuit_cannot_be_split() -> None:
    with pytest.raises(UserError, match="--split-by hash"):
        assign_splits(photographs(["a.jpg", "b.jpg"]), "circuit", 0.2)


def test_output_names_are_safe_and_unique_without_case() -> None:
    stems = output_stems(
        photographs(["4 (1).JPG", "x.jpg", "X.png", "a:b*?.jpg", "-….jpg", "ä.jpg", "n" * 300 + ".jpg"])
    )
    assert stems["4 (1).jpg"] == "4 (1)"
    assert stems["ä.jpg"] == "ä"
    assert stems["a:b*?.jpg"] == "a_b__"
    assert len({stem.lower() for stem in stems.values()}) == 7
    assert all(len(stem) <= 130 for stem in stems.values())
