"""Which photograph goes to which side, and under which name."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from utils.common.errors import UserError
from utils.sources.parsing.sources import Photograph
from utils.sources.parsing.split import assign_splits, bursts, output_stems


def photographs(names: list[str], circuit: str = "Circuit1") -> list[Photograph]:
    return [Photograph(name, name, circuit, Path(name), None, 1, "") for name in names]


def test_adding_photographs_moves_none() -> None:
    names = [f"{circuit} ({number}).JPG" for circuit in range(10) for number in range(100)]
    few = assign_splits(photographs(names[:500]), "hash", 0.2)
    many = assign_splits(photographs(names), "hash", 0.2)
    assert all(many[key] == split for key, split in few.items())
    assert 0.17 < list(many.values()).count("val") / 1000 < 0.23
    assert assign_splits(photographs([name.upper() for name in names]), "hash", 0.2) == many


@pytest.mark.parametrize("val_fraction", [1e-9, 0.5, 1 - 1e-9])
def test_neither_side_stays_empty(val_fraction: float) -> None:
    chosen = photographs(["a.jpg", "b.jpg", "c.jpg"], "C1") + photographs(["d.jpg"], "C2")
    for mode, number in (("hash", 2), ("hash", 3), ("circuit", 4)):
        assert set(assign_splits(chosen[:number], mode, val_fraction).values()) == {"train", "val"}
    assert len(assign_splits(chosen[:1], "hash", val_fraction)) == 1


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


@pytest.mark.parametrize(
    ("mode", "together", "message"),
    [("circuit", [], "--split-by hash"), ("time", [["a.jpg", "b.jpg"]], "smaller --time-gap")],
)
def test_one_circuit_or_series_cannot_be_split(mode: str, together: list[list[str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        assign_splits(photographs(["a.jpg", "b.jpg"]), mode, 0.2, together)


def test_groups_stay_whole_in_every_mode_and_keep_the_share() -> None:
    """500 groups of 1 to 3 photographs, the photographs of a group in different circuits."""
    chosen = [item for c in "abcdefgh" for item in photographs([f"{c}{n:03}.jpg" for n in range(125)], c)]
    together = [[one.key for one in chosen[start : start + 1 + start % 3]] for start in range(0, 1000, 3)]
    for mode, tolerance in (("hash", 30), ("circuit", 130), ("time", 2)):
        splits = assign_splits(chosen, mode, 0.2, together)
        assert all(len({splits[key] for key in group}) == 1 for group in together)
        assert abs(list(splits.values()).count("val") - 200) <= tolerance
        assert assign_splits(chosen[::-1], mode, 0.2, together[::-1]) == splits


def test_a_photograph_without_a_copy_stays_where_it_was() -> None:
    chosen = photographs([f"{number}.jpg" for number in range(100)])
    before, after = (assign_splits(chosen, "hash", 0.2, groups) for groups in ([], [["1.jpg", "7.jpg"]]))
    assert {key for key in before if before[key] != after[key]} <= {"7.jpg"}  # it follows the first name
    assert after["1.jpg"] == after["7.jpg"]


def test_a_group_larger_than_the_smaller_side_goes_to_the_larger_one() -> None:
    chosen = photographs([f"{number}.jpg" for number in range(100)])
    for first in range(20):  # of different hashes
        large = [item.key for item in chosen[first : first + 60]]
        for val_fraction, side in ((0.2, "train"), (0.8, "val")):
            splits = assign_splits(chosen, "hash", val_fraction, [large])
            assert {splits[key] for key in large} == {side}


def test_what_shares_a_photograph_is_one_group() -> None:
    chosen = photographs([f"{number}.jpg" for number in range(9)])
    splits = assign_splits(chosen, "time", 0.5, [["0.jpg", "8.jpg"], ["3.jpg", "5.jpg"], ["5.jpg", "8.jpg"]])
    assert len({splits[f"{number}.jpg"] for number in (0, 3, 5, 8)}) == 1


def test_a_pause_longer_than_the_gap_begins_a_new_series() -> None:
    start = datetime(2023, 4, 3, 13, 26, 37)
    times = {name: start + timedelta(seconds=after) for name, after in zip("dacb", (61, 0, 30, 0), strict=True)}
    assert bursts(times, 30) == [["a", "b", "c"], ["d"]]
    assert bursts(times, 31) == [["a", "b", "c", "d"]]
    assert bursts(times, 0) == [["a", "b"], ["c"], ["d"]]


def test_output_names_are_safe_and_unique_without_case() -> None:
    stems = output_stems(
        photographs(["4 (1).JPG", "x.jpg", "X.png", "a:b*?.jpg", "-….jpg", "ä.jpg", "n" * 300 + ".jpg"])
    )
    assert stems["4 (1).jpg"] == "4 (1)"
    assert stems["ä.jpg"] == "ä"
    assert stems["a:b*?.jpg"] == "a_b__"
    assert len({stem.lower() for stem in stems.values()}) == 7
    assert all(len(stem) <= 130 for stem in stems.values())
