"""inference.py on the photographs of the sample."""

import re
from pathlib import Path

import numpy as np
import pytest

import inference
from tests.predict.tiny_network import smooth_data, tiny_weights
from tests.support.plugin import TrainedRun, read_json
from tests.support.processes import run_guarded
from tests.support.recipes import run_command
from yolo_seg_ddp.predict.opening import wanted_classes
from yolo_seg_ddp.utils.errors import UserError


def test_inference_writes_pictures_labels_and_json_and_survives_a_broken_photograph(
    trained: TrainedRun, tmp_path: Path
) -> None:
    source = tmp_path / "photos"
    source.mkdir()
    photos = sorted((trained.processed / "val" / "images").iterdir())[:2]
    for photo in photos:
        (source / photo.name).write_bytes(photo.read_bytes())
    (source / "broken.jpg").write_bytes(photos[0].read_bytes()[:3000])
    output = tmp_path / "predictions"
    flags = (
        "--source",
        source,
        "--output",
        output,
        "--conf",
        "0.0001",
        "--max-detections",
        "5",
        "--save-crops",
        "--classes",
        "pole",
        "conductor",
        "1",
        "6",
    )
    done = run_guarded("inference.py", "--model", trained.folder / "last.pt", *flags)
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert "broken.jpg" in done.stdout
    entries = read_json(output / "predictions.json")
    assert len(entries) == 2
    assert all(len(entry["detections"]) <= 5 for entry in entries)
    found = {item["class"] for entry in entries for item in entry["detections"]}
    assert found
    assert found <= {"pole", "conductor", "other_wire", "transformers"}
    for photo in photos:
        assert (output / f"{photo.stem}.jpg").exists()
        for line in (output / "labels" / f"{photo.stem}.txt").read_text().splitlines():
            values = np.array(line.split()[1:], float)
            assert len(values) >= 6
            assert ((values >= 0) & (values <= 1)).all()
    assert list((output / "crops").rglob("*.jpg"))


def test_a_second_run_leaves_nothing_of_the_first_ones_photographs_beside_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smooth_data(tmp_path)
    photos, output = sorted((tmp_path / "val/images").iterdir()), tmp_path / "out"
    for number, photo in enumerate(photos):
        photo.rename(tmp_path / ("a.png", "a_1.png")[number])
    words = ("--model", tiny_weights(tmp_path / "best.pt"), "--output", output, "--save-crops")
    assert run_command(inference, *words, "--source", tmp_path / "*.png", "--conf", "0.4") == 0
    assert "Removed" not in capsys.readouterr().out
    (output / "mine.jpg").write_bytes(b"of the user")
    before = {path.relative_to(output).as_posix() for path in output.rglob("*.*")}
    crops = {name for name in before if name.startswith("crops/")}
    assert {"a.jpg", "a_1.jpg", "labels/a.txt", "labels/a_1.txt"} < before
    assert {name.partition("_")[0].rpartition("/")[2] for name in crops} == {"a"}
    assert run_command(inference, *words, "--source", tmp_path / "a_1.png", "--conf", "0.999") == 0
    left = {path.relative_to(output).as_posix() for path in output.rglob("*.*")}
    of_a = {
        "a.jpg",
        "labels/a.txt",
        *(name for name in crops if re.fullmatch(r".*/a_\d+\.jpg", name)),
    }
    assert before - left == of_a
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"Removed {len(of_a)} files of an earlier run on other photographs"
    [found] = [line for line in printed if "; found nothing" in line]
    said = re.search(r"the highest confidence seen is (0\.\d{3}), --conf is 0.999\)$", found)
    highest = float(said[1])  # type: ignore[index]
    [entry] = read_json(output / "predictions.json")
    assert entry["detections"] == []
    run_command(
        inference,
        *words,
        "--source",
        tmp_path / "a_1.png",
        "--conf",
        str(highest - 0.001),
    )
    scores = [
        each["confidence"] for each in read_json(output / "predictions.json")[0]["detections"]
    ]
    assert max(scores) == pytest.approx(highest, abs=6e-4)


def test_wanted_classes_are_named_or_numbered() -> None:
    names = ("pole", "wire", "6")
    assert wanted_classes(None, names) is None
    assert wanted_classes(("wire", "0"), names) == (1, 0)
    assert wanted_classes(("2",), names) == (2,)
    with pytest.raises(UserError, match="--classes mast: the model knows pole, wire, 6"):
        wanted_classes(("pole", "mast"), names)
