"""parse_labels.py, run as a command: killed, refused, strict."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import parse_labels
from tests.conftest import PROJECT, run_main
from tests.sources.parsing.raw_folder import BOX, WIRE, photo, tree, write_csv, write_raw_folder, write_zip
from utils.common.errors import UserError
from utils.data.images import upright_size
from utils.sources.parsing.sources import LABEL_CSV
from utils.sources.parsing.state import LOCK_FILE


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_raw_folder(tmp_path / "raw")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "parse_labels.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_line_width_for_polygons_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text('{"images": []}')
    for width in ("6", "9"):
        with pytest.raises(UserError):  # it holds no photographs
            run_main(parse_labels, monkeypatch, "--input", tmp_path, "--line-width", width)
    said = f"WARNING: {tmp_path}: --line-width has no effect with --format coco\n"
    assert capsys.readouterr().err == said  # of 9; 6 is the default


def test_killed_run_continues_to_the_same_result(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    write_zip(raw / "Circuit7.zip", {f"7 ({n}).JPG": photo(2400, 1600, shade=n) for n in range(24)})
    write_csv(raw, [(f"7 ({n}).JPG", [BOX, WIRE]) for n in range(24)])
    flags = ["--input", str(raw), "--workers", "1", "--output"]
    victim = subprocess.Popen([sys.executable, PROJECT / "parse_labels.py", *flags, tmp_path / "killed"])
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "killed").glob("*/labels/*.txt"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait(timeout=10) == -signal.SIGKILL
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/images/[!.]*")}
    assert 0 < len(done) < 24
    assert not (tmp_path / "killed" / "manifest.json").exists()
    assert run(*flags, tmp_path / "killed").returncode == 0
    assert sum(path.stat().st_mtime_ns == then for path, then in done.items()) >= len(done) - 1
    assert run(*flags, tmp_path / "undisturbed").returncode == 0
    assert tree(tmp_path / "killed") == tree(tmp_path / "undisturbed")


def test_missing_input_names_the_download(tmp_path: Path) -> None:
    done = run("--input", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "python download_data.py" in done.stderr
    (tmp_path / "empty").mkdir()
    assert "python download_data.py" in run("--input", tmp_path / "empty", "--output", tmp_path / "out").stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_nothing_usable_leaves_nothing_behind(raw: Path, existing: bool) -> None:
    output = raw.parent / "processed"
    if existing:
        (output / "train" / "notes").mkdir(parents=True)
    write_csv(raw, [("1 (1).JPG", "Skip")])
    done = run("--input", raw, "--output", output)
    assert done.returncode == 1
    assert f"{LABEL_CSV}:2" in done.stderr
    assert [path for path in output.rglob("*") if path.name != LOCK_FILE] == (
        [output / "train", output / "train" / "notes"] if existing else []
    )


def test_strict_fails_after_building_what_is_readable(raw: Path) -> None:
    write_csv(raw, [("1 (1).JPG", "Skip"), *((f"2 ({n}).JPG", [BOX]) for n in (1, 2, 3))])
    flags = ("--input", raw, "--output", raw.parent / "processed")
    assert run(*flags).returncode == 0
    strict = run(*flags, "--strict")
    assert strict.returncode == 1
    assert "--strict: 1 rows" in strict.stderr
    assert json.loads((raw.parent / "processed" / "manifest.json").read_text())["skipped"]["unreadable row"] == 1


@pytest.mark.parametrize(
    "flags",
    [("--val-fraction", "1"), ("--line-width", "0"), ("--long-side", "3"), ("--workers", "-1"), ("--split-by", "coin")],
)
def test_senseless_options_are_wrong_usage(flags: tuple[str, str]) -> None:
    done = run(*flags)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_native_keeps_the_photographs_size_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    original = photo(2400, 1600)
    (raw / "1 (1).JPG").write_bytes(original)
    write_csv(raw, [("1 (1).JPG", [BOX])])
    sizes = []
    for choice in (["--long-side=native"], []):
        monkeypatch.setattr(sys, "argv", ["parse_labels.py", f"--input={raw}", f"--output={tmp_path / 'out'}", *choice])
        parse_labels.main()
        (image,) = (tmp_path / "out").glob("*/images/*.jpg")
        sizes.append((upright_size(image.read_bytes()), image.read_bytes() == original))
    assert sizes == [((2400, 1600), True), ((1280, 853), False)]
