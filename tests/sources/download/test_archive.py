"""What is taken from an archive. Hostile ones: tests/security/test_writes.py."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tests.sources.download.archives import (
    PHOTOGRAPH_BYTES,
    circuit,
    folder_with,
    get_from_folder,
    photograph,
    zip_bytes,
)
from utils.common.errors import UserError
from utils.sources.download.archive import MAX_MEMBERS, choose_photographs, list_photographs


def test_chosen_photographs_are_spread_and_nested() -> None:
    members = zipfile.ZipFile(io.BytesIO(zip_bytes({f"1 ({i}).JPG": b"x" for i in range(1, 101)}))).infolist()
    few, more = (choose_photographs(members, count) for count in (10, 20))
    assert {member.filename for member in few} < {member.filename for member in more}
    numbers = [int(member.filename[3:-5]) for member in few]
    assert numbers == sorted(numbers)  # the archive's order: one pass over the file
    assert numbers[-1] - numbers[0] > 40


def test_photograph_of_the_right_size_and_wrong_content_is_written_again(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 2)))
    (tmp_path / "raw" / "Circuit1").mkdir(parents=True)
    (tmp_path / "raw" / "Circuit1" / "1 (2).JPG").write_bytes(bytes(PHOTOGRAPH_BYTES))
    get_from_folder(folder, tmp_path / "raw")
    assert (tmp_path / "raw" / "Circuit1" / "1 (2).JPG").read_bytes() == photograph(2)


def test_oversized_member_and_too_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zipfile.ZipFile(io.BytesIO(zip_bytes({"1 (1).JPG": b"x"})))
    archive.infolist()[0].file_size = archive.infolist()[0].compress_size = 200_000_001
    with pytest.raises(UserError, match="more than 200 MB"):
        list_photographs(archive, "here")
    monkeypatch.setattr(archive, "filelist", archive.infolist() * (MAX_MEMBERS + 1))
    with pytest.raises(UserError, match="100,001 members"):
        list_photographs(archive, "here")


def test_other_files_repeated_names_and_resource_forks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = {"a/1 (1).JPG": b"first", "b/1 (1).jpg": b"second", "notes.txt": b"x", "__MACOSX/._1 (1).JPG": b"fork"}
    report = get_from_folder(folder_with(tmp_path, zip_bytes(members)), tmp_path / "raw")
    assert report.num_photographs == 1
    assert (tmp_path / "raw" / "Circuit1" / "1 (1).JPG").read_bytes() == b"first"
    line = capsys.readouterr().err
    assert "2 other files in the archive ignored" in line
    assert "1 with a repeated name skipped, the first '1 (1).jpg'" in line


def test_link_in_the_circuit_folder_is_replaced_not_followed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes({"1 (1).JPG": b"photograph"}))
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    target = tmp_path / "raw" / "Circuit1"
    target.mkdir(parents=True)
    for name in ("1 (1).JPG", ".1 (1).JPG.part"):
        (target / name).symlink_to(outside)
    get_from_folder(folder, tmp_path / "raw")
    assert outside.read_bytes() == b"precious"
    assert (target / "1 (1).JPG").read_bytes() == b"photograph"
    assert not (target / "1 (1).JPG").is_symlink()
