"""What a download leaves in the raw folder, and what is taken from an archive.

Hostile archives: tests/security/test_writes.py.
"""

import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from tests.prepare.download.archives import (
    CSV,
    LABELS,
    PHOTOGRAPH_BYTES,
    circuit,
    files_under,
    folder_with,
    get,
    get_from_folder,
    photograph,
    zip_bytes,
)
from tests.support.azure_server import AzureServer, Blob
from yolo_seg_ddp.prepare.download import download, open_source
from yolo_seg_ddp.prepare.download.archive import MAX_MEMBERS, choose_photographs, list_photographs
from yolo_seg_ddp.utils.errors import UserError

DIRECTORY_BYTES = 1 << 20  # asked for when a remote zip is opened: once to plan, once to extract


def test_two_circuits_are_written_flat_and_a_second_run_sends_no_request(
    server: AzureServer, tmp_path: Path
) -> None:
    report = get(server, tmp_path, "1", "10")
    expected = {f"Circuit1/1 ({i}).JPG" for i in range(1, 7)} | {
        f"Circuit10/10 ({i}).JPG" for i in range(1, 4)
    }
    # the zips are deleted
    assert files_under(tmp_path) == expected | {LABELS, "download.json", ".download.lock"}
    assert (tmp_path / "Circuit1" / "1 (2).JPG").read_bytes() == photograph(2)
    assert report.num_photographs == 9
    assert not report.missing
    assert len(server.gets("Circuit1.zip")) == 1
    entry = json.loads((tmp_path / "download.json").read_text())["objects"]["Circuit1.zip"]
    blob = server.blobs["Circuit1.zip"]
    assert entry["url"] == server.url + "Circuit1.zip"
    assert (entry["etag"], entry["md5"], entry["size_bytes"]) == (
        blob.etag,
        blob.content_md5(),
        len(blob.content),
    )
    assert (entry["num_photographs"], entry["max_images"], entry["is_complete"]) == (6, None, True)

    num_requests = len(server.requests)
    report = get(server, tmp_path, "1", "10")
    assert report.is_unchanged
    assert report.num_photographs == 9
    assert len(server.requests) == num_requests


def test_folder_and_file_url_give_the_same(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 4, nested=True)))
    get_from_folder(folder, tmp_path / "raw")
    download(open_source(folder.as_uri()), tmp_path / "raw2", ["1"], keep_zips=True)
    assert files_under(tmp_path / "raw2") - files_under(tmp_path / "raw") == {"Circuit1.zip"}
    assert (tmp_path / "raw" / "Circuit1" / "1 (4).JPG").read_bytes() == photograph(4)
    assert get_from_folder(folder, tmp_path / "raw").is_unchanged
    get_from_folder(folder, folder)  # the output may be the source itself
    assert {LABELS, "Circuit1.zip", "Circuit1/1 (1).JPG"} <= files_under(folder)


def test_kept_zip_is_asked_for_again_only_when_it_is_gone(
    server: AzureServer, tmp_path: Path
) -> None:
    get(server, tmp_path, keep_zips=True)
    assert (tmp_path / "Circuit1.zip").read_bytes() == server.blobs["Circuit1.zip"].content
    assert get(server, tmp_path, keep_zips=True).is_unchanged
    (tmp_path / "Circuit1.zip").unlink()
    get(server, tmp_path, keep_zips=True)
    assert len(server.gets("Circuit1.zip")) == 2


def test_a_killed_extraction_continues(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.blobs["Circuit1.zip"].md5 = ""
    replaced: list[object] = []
    real_replace = os.replace

    def dies_at_the_third_photograph(origin: Path, target: Path) -> None:
        if str(target).endswith(".JPG"):
            replaced.append(target)
            if len(replaced) == 3:
                raise KeyboardInterrupt
        real_replace(origin, target)

    monkeypatch.setattr(os, "replace", dies_at_the_third_photograph)
    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path)
    monkeypatch.setattr(os, "replace", real_replace)
    assert sorted(files_under(tmp_path / "Circuit1")) == ["1 (1).JPG", "1 (2).JPG"]
    before = (tmp_path / "Circuit1" / "1 (1).JPG").stat().st_mtime_ns
    get(server, tmp_path)
    assert len(server.gets("Circuit1.zip")) == 1
    assert len(files_under(tmp_path / "Circuit1")) == 6
    assert (tmp_path / "Circuit1" / "1 (1).JPG").stat().st_mtime_ns == before


def test_max_images_takes_no_more_and_a_larger_number_adds_photographs(
    server: AzureServer, tmp_path: Path
) -> None:
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(circuit(1, 40, nested=True)))
    sent_bytes = 0
    first: set[str] = set()
    for max_images in (3, 5):
        report = get(server, tmp_path, max_images=max_images)
        names = files_under(tmp_path / "Circuit1")
        assert report.num_photographs == len(names) == max_images
        assert first <= names
        for name in names:
            number = int(name.split("(")[1].split(")")[0])
            assert (tmp_path / "Circuit1" / name).read_bytes() == photograph(number)
        new_bytes = (max_images - len(first)) * PHOTOGRAPH_BYTES
        assert (
            server.bytes_sent("Circuit1.zip") - sent_bytes
            < 2 * DIRECTORY_BYTES + new_bytes + 10_000
        )
        first, sent_bytes = names, server.bytes_sent("Circuit1.zip")
    assert sent_bytes < len(blob.content)
    assert all(
        request.status == 206 and request.if_match for request in server.gets("Circuit1.zip")
    )
    assert get(server, tmp_path, max_images=2).is_unchanged


def test_the_whole_circuit_after_few_photographs_and_a_lost_one_alone(
    server: AzureServer, tmp_path: Path
) -> None:
    server.blobs["Circuit1.zip"] = Blob(zip_bytes(circuit(1, 40)))
    get(server, tmp_path, max_images=1)
    assert get(server, tmp_path).num_photographs == len(files_under(tmp_path / "Circuit1")) == 40
    assert get(server, tmp_path, max_images=1).is_unchanged
    (tmp_path / "Circuit1" / "1 (7).JPG").unlink()
    num_sent = server.bytes_sent("Circuit1.zip")
    get(server, tmp_path)
    assert (tmp_path / "Circuit1" / "1 (7).JPG").read_bytes() == photograph(7)
    assert (
        server.bytes_sent("Circuit1.zip") - num_sent
        < 2 * DIRECTORY_BYTES + PHOTOGRAPH_BYTES + 10_000
    )


def test_other_data_under_the_same_name_is_refused(server: AzureServer, tmp_path: Path) -> None:
    mirror = folder_with(tmp_path, zip_bytes({"1 (1).JPG": b"another photograph"}))
    output = tmp_path / "raw"
    get_from_folder(mirror, output)
    with pytest.raises(UserError, match="use another --output"):
        get(server, output)
    assert (output / "Circuit1" / "1 (1).JPG").read_bytes() == b"another photograph"


def test_same_data_at_another_address_is_accepted(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    with AzureServer() as mirror:
        mirror.blobs = server.blobs
        assert get(mirror, tmp_path).is_unchanged
        assert {request.method for request in mirror.requests} == {"HEAD"}


def test_labels_edited_by_hand_are_not_overwritten(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    (tmp_path / LABELS).write_bytes(CSV + b"mine")
    with pytest.raises(UserError, match="delete it"):
        get(server, tmp_path)
    assert (tmp_path / LABELS).read_bytes().endswith(b"mine")


def test_an_output_that_cannot_be_used_is_one_line(server: AzureServer, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".download.lock"), pytest.raises(UserError, match="another download"):
        get(server, tmp_path)
    (tmp_path / "raw").write_text("a file")
    with pytest.raises(UserError, match="raw: File exists"):
        get(server, tmp_path / "raw")
    (tmp_path / "download.json").write_text('{"objects": [')
    with pytest.raises(UserError, match=r"download\.json: not valid JSON"):
        get(server, tmp_path)


def test_full_disk_is_refused_at_once(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = server.blobs["Circuit1.zip"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * len(blob.content)))
    # both the zip and its photographs, and the labels
    with pytest.raises(UserError, match=r"needs 0\.0 GiB"):
        get(server, tmp_path)
    assert not any(request.method == "GET" for request in server.requests)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: usage._replace(free=2 * len(blob.content) + len(CSV))
    )
    assert get(server, tmp_path).num_photographs == 6


def test_archive_that_unpacks_to_more_than_expected_is_refused_when_it_does_not_fit(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"1 ({index}).JPG": photograph(index, 5_000) * 20 for index in range(5)}
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(members, zipfile.ZIP_DEFLATED))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * len(blob.content)))
    with pytest.raises(UserError, match=r"needs 0\.0 GiB"):
        get(server, tmp_path)
    assert (tmp_path / "Circuit1.zip").is_file()
    assert not (tmp_path / "Circuit1").exists()


def test_chosen_photographs_are_spread_and_nested() -> None:
    members = zipfile.ZipFile(
        io.BytesIO(zip_bytes({f"1 ({i}).JPG": b"x" for i in range(1, 101)}))
    ).infolist()
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


def test_other_files_repeated_names_and_resource_forks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = {
        "a/1 (1).JPG": b"first",
        "b/1 (1).jpg": b"second",
        "notes.txt": b"x",
        "__MACOSX/._1 (1).JPG": b"fork",
    }
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
