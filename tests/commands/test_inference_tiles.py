"""inference.py on tiles, alone and shared by ranks, with a stand-in for the network."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

import benchmark_ddp
import download_data
import evaluate_model
import inference
import profile_gpu
from tests.predict.tile_scenes import stroke
from tests.support.drone_photos import exif_of, write_photo
from tests.support.plugin import read_json
from tests.support.ranks import run_ranks
from tests.support.recipes import run_command
from tests.yolo.colour_network import NAMES, ColourNetwork, install, paint
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.predict.annotation_files import COCO_FILE, LABEL_STUDIO_FILE
from yolo_seg_ddp.predict.prediction_files import read_predictions
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.text import counted

SIZE = (700, 500)
FOR_TOOLS = ("--save-coco", "--save-label-studio")


def predict(source: Path, output: Path, *flags: str) -> int:
    """Run inference.py in this process with the stand-in."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        monkeypatch.setattr(
            "yolo_seg_ddp.predict.opening.open_model", lambda *given, **named: ColourNetwork()
        )
        return run_command(
            inference,
            "--model",
            "x.pt",
            "--source",
            source,
            "--output",
            output,
            *flags,
        )


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five photographs: two wires each across the whole width, one small photograph and one that is
    no photograph.
    """
    folder = tmp_path_factory.mktemp("photos")
    for number in range(4):
        wires = [
            (number % 2, stroke(SIZE, [(0, y + 40 * number), (699, y + 80)], 8)) for y in (60, 140)
        ]
        picture = paint(wires, SIZE)[:, : 300 if number == 2 else 700]
        cv2.imwrite(str(folder / f"{number}.png"), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    (folder / "1b.jpg").write_bytes(b"no photograph")
    return folder


@pytest.fixture(scope="module")
def alone(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("alone")
    assert predict(photos, output, "--tiles", "320", "--save-crops", *FOR_TOOLS) == 0
    return files_of(output)


def test_wires_come_out_whole_in_json_labels_pictures_and_crops(
    photos: Path, alone: dict[str, bytes]
) -> None:
    entries = json.loads(alone["predictions.json"])
    assert [Path(entry["file"]).name for entry in entries] == ["0.png", "1.png", "2.png", "3.png"]
    for number, entry in enumerate(entries):
        assert (entry["width"], entry["height"]) == (300 if number == 2 else 700, 500)
        assert [item["class_id"] for item in entry["detections"]] == [number % 2] * 2
        for item in entry["detections"]:
            assert len(item["polygons"]) == 1
            assert item["box_xyxy"][0::2] == [0, entry["width"]]
        rows = [line.split() for line in alone[f"labels/{number}.txt"].decode().splitlines()]
        assert [row[0] for row in rows] == [str(number % 2)] * 2
        widths = [max(map(float, row[1::2])) - min(map(float, row[1::2])) for row in rows]
        assert min(widths) > 0.99
        assert f"{number}.jpg" in alone
        assert sum(name.startswith("crops/") and f"/{number}_" in name for name in alone) == 2
    assert not [name for name in alone if name.startswith(".")]


def test_other_programs_learn_how_the_predictions_were_made(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    assert json.loads(alone["about.json"]) == {"model": "x.pt", "classes": [*NAMES], "notes": []}
    (tmp_path / "predictions.json").write_bytes(alone["predictions.json"])
    entries = list(read_predictions(tmp_path))
    assert entries == json.loads(alone["predictions.json"])
    assert all(f"{entry['key']}.jpg" in alone for entry in entries)


def test_an_option_that_became_a_command_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(inference, "--model", "x.pt", "--source", "y", "--geo")
    assert (
        "unknown argument --geo; python -m yolo_seg_ddp maps makes the map"
        in capsys.readouterr().err
    )


def test_ranks_share_the_photographs_and_write_the_same(
    photos: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    flags = ("--tiles", "320", "--save-crops", "--batch-size", "3", *FOR_TOOLS)
    assert run_ranks(predict, 3, photos, tmp_path, *flags, join=False) == [0] * 3
    assert files_of(tmp_path) == alone


def test_more_ranks_than_photographs_and_none_readable(photos: Path, tmp_path: Path) -> None:
    assert run_ranks(predict, 2, photos / "1b.jpg", tmp_path, join=False) == [1, 1]
    assert read_json(tmp_path / "predictions.json") == []


def test_without_tiles_all_files_have_the_photographs_own_pixels(tmp_path: Path) -> None:
    # more than four times the network's input, which JPEGs once were read smaller for
    size = (1500, 1100)
    mask = np.zeros(size[::-1], bool)
    mask[200:600, 300:900] = True
    (tmp_path / "sub").mkdir()
    source = write_photo(
        tmp_path / "sub" / "ü 1.jpg",
        np.rot90(paint([(1, mask)], size)),
        exif=exif_of(orientation=6),
    )
    assert predict(tmp_path, tmp_path / "out", "--tiles", "off", "--save-crops", *FOR_TOOLS) == 0
    (entry,) = read_json(tmp_path / "out" / "predictions.json")
    assert (entry["file"], entry["width"], entry["height"]) == (str(source), *size)
    (found,) = entry["detections"]
    (for_cvat,) = read_json(tmp_path / "out" / COCO_FILE)["annotations"]
    (task,) = read_json(tmp_path / "out" / LABEL_STUDIO_FILE)
    region = task["predictions"][0]["result"][0]
    left, top, width, height = for_cvat["bbox"]
    label = np.array((tmp_path / "out" / "labels" / "ü 1.txt").read_text().split()[1:], float)
    corners = [
        found["box_xyxy"],
        _corners(np.array(found["polygons"][0])),
        (left, top, left + width, top + height),
        _corners(
            np.array(region["value"]["points"]).ravel()
            * np.tile(size, len(region["value"]["points"]))
            / 100
        ),
        _corners(label * np.tile(size, len(label) // 2)),
    ]
    assert corners == pytest.approx(np.tile((300, 200, 900, 600), (5, 1)), abs=6), (
        "a pixel of the input has 4.7"
    )
    assert (region["original_width"], region["original_height"]) == size
    assert task["data"]["image"].endswith("/sub/%C3%BC%201.jpg")
    picture = read_image(tmp_path / "out" / "ü 1.jpg")
    assert picture.shape == (*size[::-1], 3)
    assert (
        np.abs(picture[np.ix_((210, 590), (310, 890))].astype(int) - picture[400, 600]).max() < 20
    )
    (crop,) = (tmp_path / "out" / "crops").rglob("*.jpg")
    assert read_image(crop).shape[:2] == pytest.approx((400, 600), abs=10)


def _corners(points: np.ndarray) -> tuple[float, ...]:
    """Return the box around points x, y, x, y, …."""
    return (points[::2].min(), points[1::2].min(), points[::2].max(), points[1::2].max())


def test_photographs_whose_results_cannot_be_written_do_not_end_the_others(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, long_name = tmp_path / "photos", "n" * 250 + ".png"
    source.mkdir()
    for name in ("0.png", long_name):
        (source / name).write_bytes((photos / "0.png").read_bytes())
    cv2.imwrite(str(source / "tall.png"), np.zeros((100_000, 1, 3), np.uint8))
    for flag, skipped in (("--save-crops", ["tall.png", long_name]), ("", ["tall.png"])):
        output = tmp_path / f"out{flag}"
        assert predict(source, output, "--tiles", "off", *([flag] if flag else [])) == 0
        entries = read_json(output / "predictions.json")
        assert {Path(entry["file"]).name for entry in entries} == {"0.png", long_name} - set(
            skipped
        )
        said = capsys.readouterr().out
        assert all(f"skipped {source / name}: " in said for name in skipped)
        assert f"{counted(3 - len(skipped), 'photograph')}, {len(skipped)} skipped; " in said


@pytest.mark.parametrize("output", ["file", "file/folder", "/proc/results", "/proc/self"])
def test_an_output_that_is_no_folder_is_refused_before_the_work(
    output: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("a result of another program")
    place = tmp_path / output
    flags = {inference: ("--model", "x.pt", "--source", "y"), evaluate_model: ("--model", "x.pt")}
    flags |= {download_data: ("--sample", "1"), profile_gpu: (), benchmark_ddp: ()}
    for script in flags:
        with pytest.raises(
            UserError, match=rf"^--output {place}: .+; name a folder in which files can be written$"
        ):
            run_command(script, *flags[script], "--output", place)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["a result of another program"]
