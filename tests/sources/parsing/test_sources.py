"""Photographs in folders and zips, whole and damaged."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

from tests.sources.parsing.raw_folder import build, photo, problems_of, record
from utils.sources.parsing.label_csv import Problem
from utils.sources.parsing.sources import find_photographs


def test_half_extracted_photograph_is_taken_from_its_zip(raw: Path) -> None:
    (raw / "Circuit2").mkdir()
    with zipfile.ZipFile(raw / "Circuit2.zip") as archive:
        whole = {number: archive.read(f"Circuit2/2 ({number}).JPG") for number in (1, 2)}
    (raw / "Circuit2" / "2 (1).JPG").write_bytes(whole[1])
    (raw / "Circuit2" / "2 (2).JPG").write_bytes(whole[2][:-10])
    manifest = build(raw)
    assert record(manifest, "2 (1).jpg")["source"] == "Circuit2/2 (1).JPG"
    assert record(manifest, "2 (2).jpg")["source"] == "Circuit2.zip/Circuit2/2 (2).JPG"
    assert problems_of(manifest) == [("Circuit2/2 (2).JPG", "duplicate photograph")]


def test_damaged_zip_member_is_one_unreadable_photograph(raw: Path) -> None:
    data = bytearray((raw / "Circuit2.zip").read_bytes())
    data[data.find(b"\xff\xda") + 40] ^= 0xFF
    (raw / "Circuit2.zip").write_bytes(bytes(data))
    manifest = build(raw)
    assert problems_of(manifest) == [("Circuit2.zip/Circuit2/2 (1).JPG", "unreadable photograph")]
    assert "CRC" in manifest["problems"][0]["text"]


def test_what_lies_in_a_folder_that_may_be_listed_but_not_entered_is_a_problem() -> None:
    nobody = 65534
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as name:  # others may enter its parents, unlike those of pytest's folders
        folder = Path(name)
        closed = folder / "closed"
        (closed / "inner").mkdir(parents=True)
        for file in (folder / "open.jpg", closed / "a.jpg"):
            file.write_bytes(photo())
        folder.chmod(0o755)
        closed.chmod(0o444)
        is_root = os.geteuid() == 0
        try:
            if is_root:  # who may enter any folder
                os.seteuid(nobody)
            assert list(find_photographs(folder, problems)) == ["open.jpg"]
        finally:
            if is_root:
                os.seteuid(0)
            closed.chmod(0o755)
    assert {problem.place for problem in problems} == {"closed/a.jpg", "closed/inner"}
