"""Hostile label cells, file names and pictures: nothing runs, nothing outside is opened, little
memory, a line for each.
"""

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import parse_labels
from tests.prepare.parsing.raw_folder import write_csv
from tests.support.hostile import hostile_cells
from tests.support.plugin import PROJECT
from tests.support.recipes import run_command
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.predict.detections import Detections, PhotoPrediction
from yolo_seg_ddp.predict.prediction_files import PredictionWriter
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV
from yolo_seg_ddp.utils.errors import UserError

BOX = (
    '{"objects": [{"value": "pole", "polygon": [{"x": 40, "y": 30}, {"x": 120, "y": 30}, {"x": '
    '120, "y": 90}]}]}'
)
PHOTO = encode_jpeg(np.full((300, 400, 3), 90, np.uint8))


def job(name: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "tests.support.hostile_jobs", name, str(folder)]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_hostile_cells_are_reported_by_line_in_little_time_and_memory(tmp_path: Path) -> None:
    marker, raw = tmp_path / "marker", tmp_path / "raw"
    raw.mkdir()
    cells = hostile_cells(marker)
    assert len(cells) >= 20
    for name in [*cells, "good"]:
        (raw / f"{name}.jpg").write_bytes(PHOTO)
    write_csv(raw, [("good.jpg", BOX), *((f"{name}.jpg", text) for name, text in cells.items())])
    found = job("cells", tmp_path)
    assert not marker.exists()
    assert found["started"] == []
    lines = {int(item["place"].rpartition(":")[2]): item["text"] for item in found["problems"]}
    assert set(lines) == set(range(3, 3 + len(cells)))
    assert all(text.isprintable() and len(text) < 400 for text in lines.values())
    # Without the limits that this guards, they take minutes; with them, a second on a slow machine.
    slow = {name: seconds for name, seconds in found["seconds"].items() if seconds > 2.0}
    assert not slow
    assert found["more_mb"] < 300
    assert len(list((tmp_path / "processed").glob("*/labels/good.txt"))) == 1


def test_a_missing_quote_is_found_before_the_file_is_in_memory(
    tmp_path: Path,
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jpg").write_bytes(PHOTO)
    (raw / "labels.csv").write_text('Label,External ID\n"never closed' + " " * 30_000_000)
    with pytest.raises(UserError, match=r"labels\.csv:2: not a CSV row"):
        run_command(parse_labels, "--input", raw, "--output", tmp_path / "out")


NAMES_IN_THE_CSV = (
    "../../outside/secret.jpg",
    "/etc/passwd",
    "{outside}/secret.jpg",
    "secret.jpg\0.png",
    "..\\outside\\secret.jpg",
    "C:\\outside\\secret.jpg",
    "\\\\server\\share\\secret.jpg",
    "a\nb.jpg",
    "\x1b]0;title\x07.jpg",
    "%2e%2e%2foutside%2fsecret.jpg",
    "．．／outside／secret.jpg",  # full-width look-alikes
    "s\u202egpj.terces",
    "x" * 5000 + ".jpg",
    "file:///etc/passwd",
    "https://127.0.0.1:9/secret.jpg",
    "~/secret.jpg",
    "$HOME/secret.jpg",
    "link.jpg",
    "linked_folder/secret.jpg",
    "pipe.jpg",
    "zero.jpg",
    "folder.jpg",
)
LINES_OF_A_LIST = {
    "parent": "../outside/secret.jpg",
    "absolute": "{outside}/secret.jpg",
    "system": "/etc/passwd",
    "backslash": "..\\outside\\secret.jpg",
    "drive": "C:/secret.jpg",
    "nul": "a\0.jpg",
    "escape": "\x1b[2J.jpg",
    "address": "https://127.0.0.1:9/a.jpg",
    "unc": "//../../../outside/secret.jpg",
    "link": "images/link.jpg",
    "linked_folder": "images/linked/secret.jpg",
    "folder": "images/folder.jpg",
    "pipe": "images/pipe.jpg",
    "device": "images/zero.jpg",
    "long": "x" * 5000 + ".jpg",
    "other_kind": "data.yaml",
}
VALUES_IN_A_YAML = {
    "yaml_parent": "path: .\ntrain: ../../outside",
    "yaml_absolute": "path: .\ntrain: {outside}",
    "yaml_link": "path: .\ntrain: linked",
    "yaml_device": "path: .\ntrain: /dev/zero",
    "yaml_list_outside": "path: .\ntrain: ../../outside/list.txt",
    "yaml_number": "path: .\ntrain: 7",
    "yaml_nested": "path: &a [x, x]\ntrain: [*a, *a]",
    "yaml_object": "path: .\ntrain: !!python/object/apply:os.system ['true']",
    "yaml_label_link": "path: .\ntrain: labelled/images",
    "yaml_label_pipe": "path: .\ntrain: piped/images",
}  # fmt: skip


def place_specials(folder: Path, outside: Path) -> None:
    (folder / "link.jpg").symlink_to(outside / "secret.jpg")
    (folder / "linked").symlink_to(outside)
    (folder / "folder.jpg").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")


def write_sets(folder: Path, outside: Path) -> None:
    """Write one data set per hostile line or value, each in a folder that has hostile files in it
    too.
    """
    folder.mkdir()
    (folder / "images").mkdir()
    place_specials(folder / "images", outside)
    (folder / "linked").symlink_to(outside)
    for name in ("labelled", "piped"):
        (folder / name / "images").mkdir(parents=True)
        (folder / name / "labels").mkdir()
        (folder / name / "images" / "a.jpg").write_bytes(PHOTO)
    (folder / "labelled" / "labels" / "a.txt").symlink_to(outside / "secret.txt")
    os.mkfifo(folder / "piped" / "labels" / "a.txt")
    for name, line in LINES_OF_A_LIST.items():
        (folder / f"{name}.txt").write_text(line.replace("{outside}", str(outside)) + "\n")
        (folder / f"{name}.yaml").write_text(f"path: .\ntrain: {name}.txt\nnames: [pole]\n")
    for name, text in VALUES_IN_A_YAML.items():
        (folder / f"{name}.yaml").write_text(
            text.replace("{outside}", str(outside)) + "\nnames: [pole]\n"
        )
    for name in ("link", "zero", "pipe"):
        only = folder / f"only_{name}"
        only.mkdir()
        (folder / "images" / f"{name}.jpg").rename(only / f"{name}.jpg")
        (folder / "images" / f"{name}.jpg").symlink_to(only / f"{name}.jpg")
        (folder / f"folder_with_{name}.yaml").write_text(
            f"path: .\ntrain: only_{name}\nnames: [pole]\n"
        )


def test_hostile_names_are_reported_and_nothing_outside_is_opened(tmp_path: Path) -> None:
    outside, raw = tmp_path / "outside", tmp_path / "inside" / "raw"
    outside.mkdir()
    raw.mkdir(parents=True)
    (outside / "secret.jpg").write_bytes(PHOTO)
    (outside / "secret.txt").write_text("hush hush")
    (outside / "list.txt").write_text("secret.jpg\n")
    (raw / "good.jpg").write_bytes(PHOTO)
    place_specials(raw, outside)
    rows = [(name.replace("{outside}", str(outside)), BOX) for name in NAMES_IN_THE_CSV]
    write_csv(raw, [("good.jpg", BOX), *rows])
    write_sets(tmp_path / "inside" / "sets", outside)
    found = job("names", tmp_path / "inside")
    reported = [item for item in found["problems"] if item["place"].startswith(LABEL_CSV)]
    assert len(reported) == len(NAMES_IN_THE_CSV)
    links = {item["place"] for item in found["problems"]} - {item["place"] for item in reported}
    assert links == {"link.jpg", "linked", "pipe.jpg", "zero.jpg"}
    assert all(item["text"].isprintable() for item in found["problems"])
    accepted = [name for name, words in found["refused"].items() if not words]
    assert not accepted
    assert len(found["refused"]) == len(LINES_OF_A_LIST) + len(VALUES_IN_A_YAML) + 3
    assert all(words.isprintable() and "hush" not in words for words in found["refused"].values())
    hostile = {os.path.realpath(outside), "/etc/passwd", "/dev/zero"}
    assert not [
        file for file in found["opened"] if any(file.startswith(place) for place in hostile)
    ]
    assert not [
        file for file in found["opened"] if file.endswith(("pipe.jpg", "piped/labels/a.txt"))
    ]
    assert any(file.endswith("good.jpg") for file in found["opened"]), (
        "the watch itself must see what is opened"
    )
    assert found["started"] == []


def test_names_in_a_list_may_be_absolute_and_links_may_stay_inside(tmp_path: Path) -> None:
    root = tmp_path / "set"
    (root / "images").mkdir(parents=True)
    (root / "images" / "a.jpg").write_bytes(PHOTO)
    (root / "images" / "b.jpg").symlink_to(root / "images" / "a.jpg")
    (root / "list.txt").write_text(f"{root}/images/a.jpg\nimages/../images/b.jpg\n")
    (root / "data.yaml").write_text("train: list.txt\nval: images\nnames: [pole]\n")
    spec = load_dataset_yaml(root / "data.yaml")
    assert (
        spec.image_files("train")
        == spec.image_files("val")
        == [root / "images/a.jpg", root / "images/b.jpg"]
    )


def test_cut_outs_stay_in_their_folder_whatever_a_model_calls_its_classes(tmp_path: Path) -> None:
    names = ("../../evil", "/tmp/evil-absolute", "..", "bus/truck", "pole")
    count = len(names)
    boxes = np.tile(np.array([[0.0, 0, 8, 8]], np.float32), (count, 1))
    found = Detections(
        torch.from_numpy(boxes), torch.ones(count), torch.arange(count), torch.zeros(count, 32)
    )
    with PredictionWriter(tmp_path / "deep" / "out", names) as writer:
        writer.save_crops("a", np.zeros((16, 16, 3), np.uint8), PhotoPrediction(found, [], boxes))
    crops = tmp_path / "deep" / "out" / "crops"
    written = {file.relative_to(crops).as_posix() for file in tmp_path.rglob("*.jpg")}
    assert len(written) == count
    assert "pole/a_4.jpg" in written
    assert "bus_truck-3/a_3.jpg" in written
    assert not Path("/tmp/evil-absolute").exists()


def png(width: int, height: int, bits: int) -> bytes:
    """Return an even grey PNG of any size in a few bytes."""
    row = bytes(1 + -(-width * bits // 8))
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def bmp_of_runs(width: int, height: int) -> bytes:
    """Return a run-length coded BMP that claims a size and holds next to nothing."""
    data = bytes((0, 1))
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0) + bytes(
        1024
    )
    return (
        b"BM" + struct.pack("<IHHI", 14 + len(head) + len(data), 0, 0, 14 + len(head)) + head + data
    )


def test_image_bombs_are_refused_and_odd_pictures_read_in_bounded_memory(tmp_path: Path) -> None:
    even = Image.new("RGB", (320, 200), (200, 30, 40))
    other = Image.new("RGB", (320, 200), (0, 200, 0))
    (tmp_path / "warm.jpg").write_bytes(PHOTO)
    bombs = {
        "bomb_12k.png": png(12_000, 12_000, 1),
        "bomb_20k.png": png(20_000, 20_000, 1),
        "bomb_6k_16_bit.png": png(6_000, 6_000, 16),
        "bomb_30k.bmp": bmp_of_runs(30_000, 30_000),
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
    assert all(len(data) < 700_000 for data in bombs.values())
    even.save(tmp_path / "animated.png", save_all=True, append_images=[other] * 20)
    even.save(tmp_path / "animated.webp", save_all=True, append_images=[other] * 20)
    even.save(tmp_path / "animated.avif", save_all=True, append_images=[other] * 20)
    even.convert("RGBA").save(tmp_path / "clear.jp2")
    even.save(tmp_path / "pages.tif", save_all=True, append_images=[other] * 3)
    even.convert("CMYK").save(tmp_path / "cmyk.jpg")
    cv2.imwrite(str(tmp_path / "deep.png"), np.full((200, 320), 51_400, np.uint16))
    # below the bound: read, in bounded memory
    (tmp_path / "small_bomb.png").write_bytes(png(4_900, 4_900, 1))
    even.save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-40])
    (tmp_path / "cut.jpg").write_bytes(PHOTO[:-300])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("just words\n" * 50)
    (tmp_path / "page.jpg").write_text(
        "<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>"
    )
    even.save(tmp_path / "animated_as.jpg", "GIF", save_all=True, append_images=[other])
    found = job("images", tmp_path)
    read = {name: shape for name, (shape, _, _) in found.items() if isinstance(shape, list)}
    names = "animated.png animated.webp animated.avif clear.jp2 pages.tif cmyk.jpg deep.png"
    expected = {name: [200, 320, 3] for name in names.split()}
    assert read == {**expected, "warm.jpg": [300, 400, 3], "small_bomb.png": [4_900, 4_900, 3]}
    refused = {name: words for name, (words, _, _) in found.items() if isinstance(words, str)}
    assert set(bombs) < set(refused)
    assert all(words.isprintable() for words in refused.values())
    slow = {
        name: seconds
        for name, (_, seconds, _) in found.items()
        if name in refused and seconds > 0.5
    }
    assert not slow
    assert max(more_mb for _, _, more_mb in found.values()) < 300
    assert max(more_mb for name, (_, _, more_mb) in found.items() if name in bombs) < 5
