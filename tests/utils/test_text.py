"""Text for the console: sizes, tables, numbers, colours and progress."""

import math
import sys

import numpy as np
import pytest

from tests.pages.drawn import BLUE, ORANGE
from yolo_seg_ddp.utils import progress
from yolo_seg_ddp.utils.text import (
    class_color,
    counted,
    format_bytes,
    format_duration,
    format_table,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (0, "0s"),
            (59.4, "59s"),
            (59.6, "1m 00s"),
            (185, "3m 05s"),
            (3599.6, "1h 00m"),
            (3720, "1h 02m"),
        ),
        *((86399, "1d 00h"), (183600, "2d 03h"), (math.nan, "?"), (math.inf, "?"), (-1, "?")),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB")),
        *((1024**2 - 1, "1.0 MiB"), (5.1 * 1024**3, "5.1 GiB"), (1024**6, "1024.0 PiB")),
    ],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_a_number_has_its_noun() -> None:
    found = [
        counted(number, noun)
        for number, noun in ((1, "class"), (2, "class"), (0, "row"), (1200, "batch"))
    ]
    assert found == ["1 class", "2 classes", "0 rows", "1,200 batches"]


def test_format_table_aligns_numbers_right_and_text_left() -> None:
    rows = [["pole", 12, 0.5, None], ["background_structure", 1200, np.float32(0.12345), 1.0]]
    assert format_table(["class", "targets", "mAP50", "F1"], rows).splitlines() == [
        "class                 targets   mAP50      F1",
        "--------------------  -------  ------  ------",
        "pole                       12  0.5000       -",
        "background_structure     1200  0.1235  1.0000",
    ]
    assert format_table(["a", "b"], []) == "a  b\n-  -"


def test_a_long_class_name_is_cut_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    lines = format_table(["class", "targets"], [["background_structure", 12]], cut=0).splitlines()
    assert lines == ["class        targets", "-----------  -------", "backg…cture       12"]


def test_first_classes_have_the_colours_of_okabe_and_ito_and_more_classes_others() -> None:
    assert class_color(0) == ORANGE
    assert class_color(4) == BLUE
    assert len({class_color(index) for index in range(24)}) == 24
    assert all(0 <= value <= 255 for index in range(200) for value in class_color(index))
    assert all(60 < sum(class_color(index)) / 3 < 175 for index in range(8)), (
        "seen on white and on black"
    )


def test_logs_get_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(0, 100, 6))
    monkeypatch.setattr(progress, "monotonic", lambda: next(seconds))
    count = progress.Progress("photographs", 5)
    assert [*count("ab"), *count("cde")] == list("abcde")  # two batches of one evaluation
    assert list(progress.Progress("photographs", 3, is_shown=False)("abc")) == list("abc")
    seconds = iter((0, 99, 100))
    # one photograph gives no estimate
    assert list(progress.Progress("photographs", 2)("ab")) == list("ab")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "  photographs: 2 of 5, 18s left",
        "  photographs: 4 of 5, 6s left",
        "  photographs: 1 of 2",
    ]
