"""Frames of films, cameras and streams, in their order."""

import itertools
import math
import os
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np

from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.signals import StopFlag
from yolo_seg_ddp.utils.text import without_secrets

# Read with the first film; one line from here instead of FFmpeg's.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
# of frames; some streams name the rate of their clock, or none
MOST_PER_SECOND, USUAL_PER_SECOND = 240, 25.0
# a frame's number from 0 and its time in seconds, for a camera since its opening
Key = tuple[int, float]


def is_live(source: str) -> bool:
    """Return whether a source is a camera's number or the address of a stream."""
    return bool(re.match(r"(rtsps?|rtmps?|udp)://", source)) or (
        source.isdecimal() and not Path(source).exists()
    )


class Film:
    """An open film, camera or stream. Raises UserError if it cannot be opened."""

    def __init__(self, source: str) -> None:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
        self.is_live = is_live(source)
        self.name = printable(without_secrets(source), 400)
        if not self.is_live and not Path(source).is_file():
            raise UserError(
                f"--source {self.name}: no such file; name one film, a camera's number or "
                "rtsp://ADDRESS"
            )
        is_camera = self.is_live and source.isdecimal()
        self._capture = (
            cv2.VideoCapture(int(source)) if is_camera else cv2.VideoCapture(source, cv2.CAP_FFMPEG)
        )
        if not self._capture.isOpened():
            cause = (
                "check the camera or the address"
                if self.is_live
                else "it is empty, damaged or no film"
            )
            raise UserError(f"--source {self.name}: cannot be opened; {cause}")
        rate = self._capture.get(cv2.CAP_PROP_FPS)
        self.per_second = rate if 0 < rate <= MOST_PER_SECOND else USUAL_PER_SECOND
        self.whole_s = (
            0.0 if self.is_live else self._capture.get(cv2.CAP_PROP_FRAME_COUNT) / self.per_second
        )
        self.end_s = 0.0  # of what was read

    def frames(
        self, every: int, per_second: float | None, stop: StopFlag
    ) -> Iterator[tuple[Key, np.ndarray]]:
        """Yield each `every`-th frame, or `per_second` of each second, RGB uint8 (H, W, 3), until
        `stop` is set.
        """
        grabbed = itertools.takewhile(
            lambda _: not stop.is_set and self._capture.grab(), itertools.count()
        )
        last_slot = -1
        for (number, time_s), bgr in (
            self._live(grabbed) if self.is_live else self._recorded(grabbed)
        ):
            slot = number // every if per_second is None else math.floor(time_s * per_second + 1e-6)
            if (
                slot > last_slot
                and (picture := self._capture.retrieve()[1] if bgr is None else bgr) is not None
            ):
                last_slot = slot
                yield (number, time_s), cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)

    def _recorded(self, grabbed: Iterable[int]) -> Iterator[tuple[Key, None]]:
        for number in grabbed:
            # 0 where the file has no time stamps
            stamp_s = self._capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            time_s = stamp_s if stamp_s > 0 else number / self.per_second
            self.end_s = time_s + 1 / self.per_second
            yield (number, time_s), None

    def _live(self, grabbed: Iterable[int]) -> Iterator[tuple[Key, np.ndarray]]:
        """Yield the newest frame when asked for one: those before it are lost, so that nothing
        piles up.
        """
        newest: queue.Queue[tuple[Key, np.ndarray] | None] = queue.Queue()
        start_s = time.monotonic()

        def read() -> None:
            for number in grabbed:
                bgr = self._capture.retrieve()[1]
                with suppress(queue.Empty):
                    newest.get_nowait()
                newest.put(((number, time.monotonic() - start_s), bgr))
            newest.put(None)

        threading.Thread(target=read, name="camera", daemon=True).start()
        yield from iter(newest.get, None)
