"""parse_labels.py, run as a command: killed, refused, strict."""

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import parse_labels
from benchmarks.jobs import Job
from tests.prepare.download.archives import zip_bytes
from tests.prepare.parsing.raw_folder import BOX, WIRE, photo, tree, write_csv, write_raw_folder
from tests.support.recipes import run_command
from yolo_seg_ddp.data.images import read_image, upright_size
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV
from yolo_seg_ddp.prepare.parsing.state import LOCK_FILE
from yolo_seg_ddp.utils.errors import UserError


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_raw_folder(tmp_path / "raw")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Run the command in this process, from `tmp_path/raw` to `tmp_path/processed`."""

    def run(*flags: str | Path) -> None:
        run_command(
            parse_labels,
            "--input",
            tmp_path / "raw",
            "--output",
            tmp_path / "processed",
            *flags,
        )

    return run


def test_a_line_width_for_polygons_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text('{"images": []}')
    for width in ("6", "9"):
        with pytest.raises(UserError):  # it holds no photographs
            run_command(parse_labels, "--input", tmp_path, "--line-width", width)
    said = f"WARNING: {tmp_path}: --line-width has no effect with --format coco\n"
    assert capsys.readouterr().err == said  # of 9; 6 is the default


def test_the_report_begins_with_the_format_and_ends_with_the_next_command(
    raw: Path, run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "EPRI's labels, 6 photographs"
    picture = tmp_path / "processed" / "labels.jpg"
    assert (
        lines[-1]
        == f"Next: python check_data.py --data {picture.parent}/dataset.yaml  # and look at "
        f"{picture}"
    )
    assert max(read_image(picture).shape) > 1000
    assert any("circuits: Circuit" in line for line in lines)
    (tmp_path / "yolo").mkdir()
    for number in range(5):
        (tmp_path / "yolo" / f"{number}.jpg").write_bytes(photo(1280, 960, shade=20 * number))
        # 16 x 16 px
        (tmp_path / "yolo" / f"{number}.txt").write_text("0 .2 .2 .2125 .2 .2125 .2167 .2 .2167\n")
    (tmp_path / "yolo" / "classes.txt").write_text("pond\n")
    run("--input", tmp_path / "yolo")
    text = capsys.readouterr().out
    assert text.startswith("YOLO labels, 5 photographs, 5 regions of 1 class\n")
    assert not re.search("circuit|EPRI", text)
    assert "at an input of 640 px; train with --img-size 960\nNext: " in text
    assert "dataset.yaml --img-size 960  # and look" in text


def test_killed_run_continues_to_the_same_result(
    tmp_path: Path,
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    members = {f"7 ({n}).JPG": photo(2400, 1600, shade=n) for n in range(24)}
    (raw / "Circuit7.zip").write_bytes(zip_bytes(members))
    write_csv(raw, [(f"7 ({n}).JPG", [BOX, WIRE]) for n in range(24)])
    flags = ["--input", str(raw), "--workers", "1", "--output"]
    with Job(
        [sys.executable, "parse_labels.py", *flags, tmp_path / "killed"], tmp_path / "log"
    ) as victim:
        victim.wait_until(
            lambda: len(list((tmp_path / "killed").glob("*/labels/*.txt"))) >= 5, "five labels", 30
        )
    assert victim.popen.returncode == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/images/[!.]*")}
    assert 0 < len(done) < 24
    assert not (tmp_path / "killed" / "manifest.json").exists()
    run_command(parse_labels, *flags, tmp_path / "killed")
    assert sum(path.stat().st_mtime_ns == then for path, then in done.items()) >= len(done) - 1
    run_command(parse_labels, *flags, tmp_path / "undisturbed")
    assert tree(tmp_path / "killed") == tree(tmp_path / "undisturbed")


def test_a_data_set_that_the_command_made_is_read_again_without_a_word(
    raw: Path, run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`labels.jpg` was called a photograph without a row."""
    run()
    capsys.readouterr()
    run("--input", tmp_path / "processed", "--output", tmp_path / "again", "--keep-unlabelled")
    said = capsys.readouterr().out
    assert said.startswith("YOLO labels, 6 photographs, 12 regions of 8 classes\n")
    assert not re.search("left out|no row|not read|not used", said)


def test_missing_input_names_the_download_for_its_own_folder_only(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (lambda: None, (tmp_path / "raw").mkdir):
        make()
        with pytest.raises(UserError, match=r"with --input$"):
            run()
    with pytest.raises(UserError, match=r"data/raw: no such folder; .* python download_data\.py"):
        run("--input", "data/raw")
    assert not (tmp_path / "processed").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_nothing_usable_leaves_nothing_behind(
    raw: Path, run: Callable[..., None], existing: bool
) -> None:
    output = raw.parent / "processed"
    if existing:
        (output / "train" / "notes").mkdir(parents=True)
    before = list(output.rglob("*"))
    write_csv(raw, [("1 (1).JPG", "Skip")])
    with pytest.raises(UserError, match=f"{LABEL_CSV}:2"):
        run()
    assert [path for path in output.rglob("*") if path.name != LOCK_FILE] == before


def test_strict_fails_after_building_what_is_readable(raw: Path, run: Callable[..., None]) -> None:
    write_csv(raw, [("1 (1).JPG", "Skip"), *((f"2 ({n}).JPG", [BOX]) for n in (1, 2, 3))])
    run()
    with pytest.raises(UserError, match="--strict: 1 of the rows"):
        run("--strict")
    assert (
        json.loads((raw.parent / "processed" / "manifest.json").read_text())["skipped"][
            "unreadable row"
        ]
        == 1
    )


def test_native_keeps_the_photographs_size_and_bytes(
    tmp_path: Path, run: Callable[..., None]
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    original = photo(2400, 1600)
    (raw / "1 (1).JPG").write_bytes(original)
    write_csv(raw, [("1 (1).JPG", [BOX])])
    sizes = []
    for choice in (["--long-side=native"], []):
        run(*choice)
        (image,) = (tmp_path / "processed").glob("*/images/*.jpg")
        sizes.append((upright_size(image.read_bytes()), image.read_bytes() == original))
    assert sizes == [((2400, 1600), True), ((1280, 853), False)]
