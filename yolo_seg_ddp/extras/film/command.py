"""Find objects in a film or in the pictures of a camera; write a drawn film and predictions.jsonl.

    python inference.py --model models/mine/best.pt --source flight.mp4 --every 5

A camera is named by its number, such as --source 0, a stream by its address. Ctrl-C ends the
command; what it wrote is complete.
"""

import argparse
import itertools
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cv2

from yolo_seg_ddp.extras.film.frames import Film, is_live
from yolo_seg_ddp.extras.film.positions import Positions
from yolo_seg_ddp.pages import draw_instances
from yolo_seg_ddp.predict.opening import open_predictor
from yolo_seg_ddp.predict.options import PredictOptions
from yolo_seg_ddp.predict.prediction_files import photo_entry
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.distributed import read_rank_environment
from yolo_seg_ddp.utils.errors import UsageError, UserError
from yolo_seg_ddp.utils.files import claimed_output, new_text_file
from yolo_seg_ddp.utils.options import option
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.signals import StopFlag
from yolo_seg_ddp.utils.text import counted

SUFFIXES = (
    ".mp4",
    ".mov",
    ".m4v",
    ".avi",
    ".mkv",
    ".webm",
    ".mts",
    ".m2ts",
    ".ts",
    ".mpg",
    ".mpeg",
    ".wmv",
    ".3gp",
)
PREDICTIONS = "predictions.jsonl"
WHOLE_SHARE = 0.95  # of the duration in a film's header, which may be an estimate
CODE = cv2.VideoWriter.fourcc(*"mp4v")  # MPEG-4; the packages of OpenCV have no encoder of H.264


@dataclass(frozen=True)
class FilmConfig(PredictOptions):
    """Options of `inference.py` for a film."""

    source: str = option(
        None, "film, camera's number, or address such as rtsp://camera/1", required=True
    )
    output: str = option(
        "outputs/predictions", f"folder for the drawn film and {PREDICTIONS}", metavar="DIR"
    )
    every: int = option(1, "predict on every N-th frame", at_least=1, at_most=1000)
    frames_per_second: float | None = option(
        None,
        "predict on so many frames of each second; unset: on all",
        at_least=0.01,
        needs="every=1",
    )


def names_film(arguments: Sequence[str]) -> bool:
    """Return whether a command line of inference.py names a film, a camera or a stream with
    --source.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--source", nargs="?")
    source = parser.parse_known_args(arguments)[0].source or ""
    return is_live(source) or (source.lower().endswith(SUFFIXES) and not Path(source).is_dir())


def main() -> int:
    """Predict on a film; return the exit code: 128 and the signal's number if one ended it."""
    config = parse_config(FilmConfig, __doc__)
    if read_rank_environment().world_size > 1:
        raise UsageError("--source: one process reads a film; start the command without torchrun")
    with claimed_output(config.output) as output:
        film = Film(config.source)
        positions = Positions(Path(config.source))
        target = output / ("camera.mp4" if film.is_live else f"{Path(config.source).stem}.mp4")
        if target.exists() and not film.is_live and target.samefile(config.source):
            raise UsageError(
                f"--output {config.output}: holds the film itself; name another folder"
            )
        predictor, names = open_predictor(config)
        with StopFlag() as stop, ExitStack() as stack:
            frames = film.frames(config.every, config.frames_per_second, stop)
            first = list(itertools.islice(frames, 1))
            if not first:
                raise UserError(
                    f"--source {film.name}: no frame was read; it is damaged or empty, or was "
                    "interrupted"
                )
            output.mkdir(parents=True, exist_ok=True)
            # Nothing is written through a link.
            target.unlink(missing_ok=True)
            per_second = min(
                config.frames_per_second or film.per_second / config.every, film.per_second
            )
            size = first[0][1].shape[1::-1]
            drawn = cv2.VideoWriter(str(target), cv2.CAP_FFMPEG, CODE, per_second, size)
            # Without it no player opens the film.
            stack.callback(drawn.release)
            if not drawn.isOpened():
                raise UserError(
                    f"{target}: cannot be written as a film of {size[0]} x {size[1]} pixels"
                )
            lines = stack.enter_context(new_text_file(output / PREDICTIONS))
            counts: Counter[str] = Counter()
            num_frames = num_drawn = num_placed = 0
            start_s = time.perf_counter()
            progress = Progress("frames", round(film.whole_s * per_second), not film.is_live)
            for (number, time_s), picture, prediction in progress(
                predictor.predict(itertools.chain(first, frames))
            ):
                place = positions.at(time_s)
                entry = photo_entry(names, picture.shape, prediction)
                lines.write(
                    json.dumps({"frame": number, "time_s": round(time_s, 3)} | place | entry) + "\n"
                )
                # The line is complete, whatever ends this process.
                lines.flush()
                canvas = cv2.cvtColor(
                    draw_instances(picture, *prediction.drawn, names), cv2.COLOR_RGB2BGR
                )
                # where a camera left frames out
                repeats = max(1, math.ceil(time_s * per_second - 1) - num_drawn)
                for _ in range(repeats):
                    # The size of a stream may change.
                    drawn.write(cv2.resize(canvas, size))
                num_drawn += repeats
                counts.update(each["class"] for each in entry["detections"])
                num_frames += 1
                num_placed += bool(place)
    summary = ", ".join(f"{counts[name]} {name}" for name in names if counts[name]) or "nothing"
    print(
        f"{counted(num_frames, 'frame')} of {film.name}{f', until {stop.reason}' * stop.is_set}; "
        f"found {summary}"
    )
    print(f"Results in {config.output}: {target.name}, {PREDICTIONS}")
    print(
        f"{1000 * (time.perf_counter() - start_s) / num_frames:,.0f} ms per frame, with reading, "
        "drawing and writing"
    )
    if positions.file:
        print(f"{positions.file.name}: positions of {counted(num_placed, 'frame')}")
    if not stop.is_set and film.end_s < WHOLE_SHARE * film.whole_s:
        end = f"its frames end after {film.end_s:.1f} of {film.whole_s:.1f} s"
        raise UserError(f"--source {film.name}: damaged or incomplete, {end}")
    return 128 + signal.Signals[stop.reason] if stop.is_set else 0
