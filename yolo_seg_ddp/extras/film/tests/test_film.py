"""inference.py on films and cameras, and what it does with those that it cannot read."""

import itertools
import json
import signal
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

import inference
from tests.predict.tiny_network import tiny_weights
from tests.support.recipes import run_command
from yolo_seg_ddp.extras.film import command, names_film
from yolo_seg_ddp.extras.film.positions import Positions, place_of
from yolo_seg_ddp.utils.errors import UsageError, UserError


def write_film(path: Path, num_frames: int = 12) -> Path:
    """Write another smooth picture, 96 x 64, for each frame, 10 a second."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, (96, 64))
    for number in range(num_frames):
        rough = np.random.default_rng(number).integers(0, 255, (4, 6, 3), np.uint8)
        writer.write(cv2.resize(rough, (96, 64), interpolation=cv2.INTER_CUBIC))
    writer.release()
    return path


def read_film(path: Path) -> list[np.ndarray]:
    film = cv2.VideoCapture(str(path))
    return [film.retrieve()[1] for _ in iter(film.grab, False)]


@pytest.fixture
def predict(tmp_path: Path) -> Any:
    """Calls inference.py, which writes to `out`."""
    weights = tiny_weights(tmp_path / "best.pt")
    flags = (
        "--model",
        weights,
        "--output",
        tmp_path / "out",
        "--conf",
        "0.45",
        "--batch-size",
        "4",
        "--threads",
        "1",
    )
    return lambda source, *more: run_command(inference, *flags, "--source", source, *more)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_a_film_gives_for_each_frame_what_its_photograph_gives(
    predict: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film, out = write_film(tmp_path / "flight.mp4"), tmp_path / "out"
    text = "[latitude: 47.1] [longitude: 8.2] [rel_alt: 1.200 abs_alt: 400.500]"
    (tmp_path / "flight.SRT").write_text(
        f"\ufeff1\n00:00:00,200 --> 00:00:00,300\n<font>{text}</font>\n\n2\n"
    )
    assert predict(film, "--every", "3") == 0
    assert f"Results in {out}: flight.mp4, predictions.jsonl\n" in capsys.readouterr().out
    found = read_lines(out)
    assert [(line["frame"], line["time_s"], "latitude" in line) for line in found] == [
        *((0, 0.0, False), (3, 0.3, True), (6, 0.6, True), (9, 0.9, True))
    ]
    for line, frame in zip(found, read_film(film)[::3], strict=True):
        cv2.imwrite(str(tmp_path / f"{line['frame']}.png"), frame)
    assert predict(tmp_path / "*.png") == 0
    photos = json.loads((out / "predictions.json").read_text())
    assert [line["detections"] for line in found] == [photo["detections"] for photo in photos]
    assert sum(len(photo["detections"]) for photo in photos) > 4
    assert len(read_film(out / "flight.mp4")) == 4
    with pytest.raises(UsageError, match="holds the film itself"):
        predict(out / "flight.mp4")
    assert predict(film, "--frames-per-second", "4") == 0
    assert [line["frame"] for line in read_lines(out)] == [0, 3, 5, 8, 10]
    assert len(read_film(out / "flight.mp4")) == 5


def write_uneven_film(path: Path) -> Path:
    """Write six red frames, each 0.1 s, and six blue ones, each 0.3 s, by changing an even film's
    table of times.
    """
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 10, (96, 64))
    for bgr in [(30, 30, 200)] * 6 + [(200, 30, 30)] * 6:
        writer.write(np.full((64, 96, 3), bgr, np.uint8))
    writer.release()
    film = bytearray(path.read_bytes())
    table = film.find(b"stts")
    ticks = int.from_bytes(film[table + 16 : table + 20], "big")
    # one row more: 8 bytes
    film[table + 8 : table + 20] = struct.pack(">5I", 2, 6, ticks, 6, 3 * ticks)
    for box in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stts"):
        size = slice(film.find(box) - 4, film.find(box))
        film[size] = struct.pack(">I", int.from_bytes(film[size], "big") + 8)
    whole_ms = slice(film.find(b"elst") + 12, film.find(b"elst") + 16)
    film[whole_ms] = struct.pack(">I", 2400)
    path.write_bytes(film)
    return path


def test_a_film_of_uneven_rate_keeps_times_places_colours_and_its_length(
    predict: Any, tmp_path: Path
) -> None:
    film, out = write_uneven_film(tmp_path / "a.mp4"), tmp_path / "out" / "a.mp4"
    cue = "{}:{}:00,600 --> {}:{}:01,000\n[latitude: {}] [longitude: 8.2]\n\n"
    (tmp_path / "a.SRT").write_text(
        cue.format("00", "00", "00", "00", 47) + cue.format("01", "02", "01", "02", 48)
    )
    assert predict(film, "--conf", "0.99") == 0
    times_s = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1]
    lines = read_lines(tmp_path / "out")
    assert [line["time_s"] for line in lines] == times_s
    assert [line["time_s"] for line in lines if line.get("latitude") == 47] == [
        0.6,
        0.9,
        1.2,
        1.5,
        1.8,
    ]
    places = Positions(film)
    at = [
        places.at(time_s).get("latitude") for time_s in (0.5, 0.7, 2.1, 62.7, 120.7, 3720.5, 3720.7)
    ]
    assert at == [None, 47, None, None, None, None, 48]
    assert predict(film, "--frames-per-second", "1", "--conf", "0.99") == 0
    assert [line["time_s"] for line in read_lines(tmp_path / "out")] == [0, 1.2, 2.1]
    strongest = [int(frame.mean(axis=(0, 1)).argmax()) for frame in read_film(out)]
    assert strongest == [2, 0, 0], "red, blue and blue, in OpenCV's order"
    assert cv2.VideoCapture(str(out)).get(cv2.CAP_PROP_FPS) == 1


def test_a_damaged_film_is_one_line(
    predict: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, out = write_film(tmp_path / "whole.mp4").read_bytes(), tmp_path / "out"
    for content in (b"", b"no film", whole[: len(whole) // 2]):
        (tmp_path / "a.mp4").write_bytes(content)
        with pytest.raises(
            UserError, match=r"a\.mp4: cannot be opened; it is empty, damaged or no film"
        ):
            predict(tmp_path / "a.mp4")
    assert capfd.readouterr() == ("", "")  # also nothing from FFmpeg
    with pytest.raises(UserError, match=r"none\.mp4: no such file; name one film"):
        predict(tmp_path / "none.mp4")
    assert not out.exists()
    cut = write_film(tmp_path / "cut.avi", 40).read_bytes()
    (tmp_path / "cut.avi").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(
        UserError, match=r"cut\.avi: damaged or incomplete, its frames end after \d\.\d of 4\.0 s"
    ):
        predict(tmp_path / "cut.avi", "--every", "4")
    assert len(read_lines(out)) == len(read_film(out / "cut.mp4")) > 1


def test_ctrl_c_leaves_whole_lines_and_a_film_that_opens(
    predict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_of = command.photo_entry
    presses = iter([signal.SIGINT])
    monkeypatch.setattr(
        command,
        "photo_entry",
        lambda *given: ([*map(signal.raise_signal, presses)], entry_of(*given))[1],
    )
    assert predict(write_film(tmp_path / "a.mp4")) == 128 + signal.SIGINT
    # a batch
    assert len(read_lines(tmp_path / "out")) == len(read_film(tmp_path / "out" / "a.mp4")) == 4


def test_a_slow_computer_gets_the_newest_picture_of_a_camera(
    predict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = threading.Event(), threading.Event()

    def grab() -> bool:  # the second picture comes when the first one is drawn
        number = next(numbers)
        assert number == 0 or started.wait(60)
        (ended.set if number == 40 else bool)()
        return number < 40

    def drawn_late(*given: Any) -> np.ndarray:
        started.set()
        assert ended.wait(60)
        return draw(*given)

    draw, numbers = command.draw_instances, itertools.count()
    picture = (True, np.zeros((64, 96, 3), np.uint8))
    camera = SimpleNamespace(
        isOpened=lambda: True, get=lambda _: 0.0, grab=grab, retrieve=lambda: picture
    )
    closed = SimpleNamespace(isOpened=lambda: False)
    monkeypatch.setattr(cv2, "VideoCapture", lambda *source: camera if source == (7,) else closed)
    monkeypatch.setattr(command, "draw_instances", drawn_late)
    assert predict(7, "--batch-size", "1") == 0
    assert [line["frame"] for line in read_lines(tmp_path / "out")] == [0, 39]
    with pytest.raises(
        UserError, match=r"rtsp://…@camera/1: cannot be opened; check the camera or the address"
    ):
        predict("rtsp://me:secret@camera/1")


# Of real files: Mavic 2, Mavic 3, older firmware, Mavic Pro, Phantom 4 RTK, Matrice 300, Avata 2; a
# drone without a position.
PLACES: dict[str, tuple[float | None, ...]] = {
    "[latitude : 31.452012] [longtitude : 74.398751] [altitude: 213.98]": (
        31.452012,
        74.398751,
        None,
        213.98,
    ),
    "[latitude: 3.41531] [longitude: -3.37440] [rel_alt: -2.4 abs_alt: 0.401]": (
        3.41531,
        -3.3744,
        -2.4,
        0.401,
    ),
    "[latitude: 1.5] [longitude: 2.5] [rel_alt 57.2 abs_alt 204.6]": (1.5, 2.5, 57.2, 204.6),
    "HOME(149.02,-20.25) 2017.08.05\nGPS(149.0251,-20.2533,16) BAROMETER:1.9": (
        -20.2533,
        149.0251,
        1.9,
        None,
    ),
    "GPS (-58.85, -34.23, 15), HOME (-58.84, -34.2, -57.98m), H 85.80m, H.S 2m/s": (
        -34.23,
        -58.85,
        85.8,
        None,
    ),
    "2022.06.21 16:06:17\nGPS(36.6146,-6.1120,0.0M) BAROMETER:0.3M": (36.6146, -6.112, 0.3, None),
    "GPS(47.1234,8.6543,469.800) BAROMETER(91.2) HOME(47.1234,8.6543)": (
        47.1234,
        8.6543,
        91.2,
        None,
    ),
    "[iso : 100] [latitude: 0.000000] [longitude: 0.000000] [altitude: 0.0]": (),
    "GPS (n/a, n/a, n/a), D n/a, H n/a": (),
}


@pytest.mark.parametrize("text", PLACES)
def test_positions_are_read_as_djis_drones_write_them(text: str) -> None:
    named = zip(("latitude", "longitude", "height_m", "altitude_m"), PLACES[text], strict=False)
    assert place_of(text) == {name: value for name, value in named if value is not None}


def test_what_is_no_film_is_told_so(
    predict: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ("a.MP4", "1", "rtsp://camera/1", "a.jpg", str(tmp_path), "")
    assert [names_film([f"--source={source}"]) for source in sources] == [True] * 3 + [False] * 3
    for flag, answer in (
        ("--show", "no window opens; the annotated pictures"),
        ("--every", "it is for a film"),
    ):
        with pytest.raises(SystemExit):
            predict("a.jpg", flag)
        assert f"unknown argument {flag}; {answer}" in capsys.readouterr().err
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    assert predict(tmp_path / "a.jpg") == 1
    assert "Results in" not in capsys.readouterr().out
