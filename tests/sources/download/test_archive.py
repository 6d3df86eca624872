"""Archives, honest and hostile."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest

from tests.sources.download.archives import (
    PHOTOGRAPH_BYTES,
    circuit,
    files_under,
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


def special(name: str, mode: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def encrypted() -> bytes:
    content = bytearray(zip_bytes({"1 (1).JPG": b"secret"}))
    content[content.index(b"PK\x01\x02") + 8] |= 0x1
    return bytes(content)


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (zip_bytes({"1 (1).JPG": b"good", "../evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"a/../../evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"..\\evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"/tmp/evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"C:\\evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"../evil.txt": b"bad"}), "leaves the folder"),
        (special("link.jpg", stat.S_IFLNK | 0o777), "is a link or a device"),
        (special("device.jpg", stat.S_IFCHR | 0o666), "is a link or a device"),
        (encrypted(), "is encrypted"),
        (zip_bytes({"bomb.jpg": bytes(20_000_000)}, zipfile.ZIP_DEFLATED), "unpacks to more than 200 times"),
        (b"not a zip at all", "is damaged"),
        (zip_bytes({"1 (1).JPG": b"x" * 1000})[:-30], "is damaged"),
    ],
)
def test_hostile_archive_writes_nothing(tmp_path: Path, archive: bytes, message: str) -> None:
    folder = folder_with(tmp_path, archive)
    output = tmp_path / "deep" / "raw"
    before = files_under(tmp_path)
    with pytest.raises(UserError, match=message):
        get_from_folder(folder, output)
    assert files_under(tmp_path) - before <= {"deep/raw/.download.lock"}


def test_oversized_member_and_too_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zipfile.ZipFile(io.BytesIO(zip_bytes({"1 (1).JPG": b"x"})))
    archive.infolist()[0].file_size = archive.infolist()[0].compress_size = 200_000_001
    with pytest.raises(UserError, match="more than 200 MB"):
        list_photographs(archive, "here")
    monkeypatch.setattr(archive, "filelist", archive.infolist() * (MAX_MEMBERS + 1))
    with pytest.raises(UserError, match="100,001 members"):
        list_photographs(archive, "here")


def test_lying_size_is_stopped_by_the_checksum(tmp_path: Path) -> None:
    content = bytearray(zip_bytes({"1 (1).JPG": b"\x01\x02" * 50_000}, zipfile.ZIP_DEFLATED))
    directory = content.index(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = (1000).to_bytes(4, "little")
    folder = folder_with(tmp_path, bytes(content))
    with pytest.raises(UserError, match="is damaged"):
        get_from_folder(folder, tmp_path / "raw")
    assert files_under(tmp_path / "raw" / "Circuit1") == set()


def test_flipped_bit_is_found(tmp_path: Path) -> None:
    content = bytearray(zip_bytes(circuit(1, 2)))
    content[1000] ^= 1
    with pytest.raises(UserError, match=r"'1 \(1\)\.JPG' is damaged"):
        get_from_folder(folder_with(tmp_path, bytes(content)), tmp_path / "raw")


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
