"""A whole run with damaged data and with secrets around: what is wrong is listed, and no secret is
written anywhere.
"""

from pathlib import Path

import numpy as np
import pytest

import download_data
from tests.prepare.parsing.raw_folder import polygon, write_csv
from tests.support.plugin import read_json, run_script
from yolo_seg_ddp.data.dataset import SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.data.loader import ShardBatches, get_dataloader
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV
from yolo_seg_ddp.utils import errors
from yolo_seg_ddp.utils.errors import DataErrors, UserError

SECRET = "hush-4f1d"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}-1",
    "HF_TOKEN": f"{SECRET}-2",
    "WANDB_API_KEY": f"{SECRET}-3",
    "DB_PASSWORD": f"{SECRET}-4",
    "GIT_AUTHOR_EMAIL": f"{SECRET}-5@example.org",
    "HTTPS_PROXY": f"http://user:{SECRET}-6@127.0.0.1:9",
    "MY_URL": f"https://user:{SECRET}-7@example.org/?sig={SECRET}-8",
}


def write_raw(folder: Path, num_photographs: int) -> None:
    """Write photographs and labels: of every hundred one photograph is damaged, and two labels."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows: list[tuple[str, object]] = []
    for number in range(num_photographs):
        name = f"1 ({number}).jpg"
        image = rng.integers(0, 255, (96, 128, 3), dtype=np.uint8)
        (folder / name).write_bytes(encode_jpeg(image, 60))
        left = number % 60
        rows.append(
            (name, [polygon("pole", (left, 20), (left + 60, 20), (left + 60, 80), (left, 80))])
        )
    (folder / "1 (3).jpg").write_bytes((folder / "1 (3).jpg").read_bytes()[:900])
    (folder / "1 (4).jpg").write_bytes(b"")
    rows[5] = (rows[5][0], "{'objects': [")
    rows[6] = (rows[6][0], '{"objects": [{"value": "pole", "polygon": []}]}')
    rows[7] = (rows[7][0], '{"objects": [{"value": "pole", "polygon": [{"x": 1, "y": "two"}]}]}')
    write_csv(folder, rows)


def test_a_run_on_damaged_data_ends_well_lists_all_and_writes_no_secret(tmp_path: Path) -> None:
    raw, processed, run = tmp_path / "raw", tmp_path / "processed", tmp_path / "run"
    write_raw(raw, 24)
    parse = ("parse_labels.py", "--input", raw, "--workers", "1", "--output")
    data, weights = processed / "dataset.yaml", run / "last.pt"
    train = (
        "--model",
        "yolov8n-seg.yaml",
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--img-size",
        "64",
        "--device",
        "cpu",
    )
    commands: list[tuple[str | Path, ...]] = [
        (*parse, processed),
        (*parse, tmp_path / "again"),
        ("train_yolo_ddp.py", "--data", data, "--save-dir", run, *train),
        ("evaluate_model.py", "--model", weights, "--data", data, "--output", tmp_path / "judged"),
    ]
    said = ""
    for command in commands:
        done = run_script("python", *command, timeout_s=600, **SECRETS)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        said += done.stdout + done.stderr
    assert read_json(run / "status.json")["state"] == "finished"
    manifest = read_json(processed / "manifest.json")
    places = {item["place"]: item["text"] for item in manifest["problems"]}
    unusable = {"1 (6).jpg", "1 (7).jpg"}  # their only objects; they count as no backgrounds
    assert set(places) == {
        "1 (3).jpg",
        "1 (4).jpg",
        *unusable,
        *(f"{LABEL_CSV}:{line}" for line in (7, 8, 9)),
    }
    assert "empty file" in places["1 (4).jpg"]
    assert "0 different points" in places[f"{LABEL_CSV}:8"]
    assert all(place in said for place in places)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (
        processed / "manifest.json"
    ).read_bytes()
    assert SECRET not in said
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"last.pt", "status.json", "config.yaml", "metrics.jsonl", "state.pt"} <= {
        file.name for file in files
    }
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert any(b"yolov8n-seg.yaml" in file.read_bytes() for file in files), (
        "the search itself must find what is there"
    )


def damaged_set(folder: Path) -> Path:
    """Write a YOLO data set of 100 photographs of which two are damaged, and three labels."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    picture = encode_jpeg(np.full((48, 64, 3), 90, np.uint8))
    for number in range(100):
        (folder / "images" / f"{number:02}.jpg").write_bytes(picture)
        (folder / "labels" / f"{number:02}.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n")
    (folder / "data.yaml").write_text("train: images\nval: images\nnames: [pole]\n")
    return folder / "data.yaml"


def test_every_damaged_label_is_listed_and_alike_twice(tmp_path: Path) -> None:
    file = damaged_set(tmp_path)
    (tmp_path / "labels" / "07.txt").write_text("0 0.1 0.1\n")
    (tmp_path / "labels" / "50.txt").write_text(
        "0 0.1 0.1 0.5 0.1 0.5 0.5\n0 nan 0.1 0.5 0.1 0.5 0.5\n"
    )
    (tmp_path / "labels" / "51.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "labels" / "60.txt").write_text("")  # a picture without objects: right
    found = []
    for _ in range(2):
        with pytest.raises(
            DataErrors, match=r"3 of 100 label files of `train` cannot be used: .*07"
        ) as refused:
            read_photos(load_dataset_yaml(file), "train")
        found.append(refused.value.details)
    assert found[0] == found[1]
    assert [Path(line.split(": ")[0]).name for line in found[0]] == [
        "07.txt:1",
        "50.txt:2",
        "51.txt:1",
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_without_cache_damage_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    file = damaged_set(tmp_path)
    (tmp_path / "images" / "02.jpg").write_bytes(b"no picture")
    dataset = SegmentationDataset(read_photos(load_dataset_yaml(file), "train"), 64)

    def load() -> None:
        for _ in get_dataloader(dataset, ShardBatches(8, 4, 0, 1), workers, pin_memory=False):
            continue

    with pytest.raises(SystemExit):
        errors.run_script(load)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "02.jpg: unreadable photograph (not a picture" in line


@pytest.mark.parametrize(
    "words",
    [
        ("--base-url", "https://user:{s}@127.0.0.1:9/x?sig={s}"),
        ("--base-url", "ftp://user:{s}@127.0.0.1/x?sig={s}"),
        ("--base-url", "http://user:{s}@example.org/x?sig={s}"),
        ("--base-url", "https://user:{s}@host:port/?sig={s}"),
        ("https://user:{s}@127.0.0.1:9/x?sig={s}",),
        ("--base-ur=https://user:{s}@127.0.0.1:9/x?sig={s}",),
        ("--base-url", "https://user:{s}@127.0.0.1:9/x?sig={s}", "--sample", "2"),
    ],
)
def test_a_failing_download_shows_no_secret(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr("yolo_seg_ddp.prepare.download.source.RetryPolicy.wait", lambda *_: None)
    monkeypatch.setattr("yolo_seg_ddp.prepare.download.web._AnnouncedRetry.sleep", lambda *_: None)
    arguments = [word.format(s=SECRET) for word in words]
    with pytest.raises((UserError, SystemExit)) as ended:
        download_data.main([*arguments, "--output", str(tmp_path / "raw")])
    streams = capsys.readouterr()
    assert SECRET not in f"{ended.value}{streams.out}{streams.err}"
    assert isinstance(ended.value, UserError) or (
        isinstance(ended.value, SystemExit) and ended.value.code == 2
    )
