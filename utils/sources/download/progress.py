"""Prints a download's progress and speed."""

import sys
import time
from typing import IO, Any

from tqdm import tqdm

from utils.common.text import is_terminal

CHUNK_BYTES = 1 << 16
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A progress bar on a terminal, otherwise a line about every ten seconds; on stderr.

    `position` counts all bytes on disk, including those of an earlier run; `received_bytes` only those of this run.
    """

    def __init__(self, total_bytes: int) -> None:
        self.position = 0
        self.received_bytes = 0
        self._total_bytes = total_bytes
        self._started = self._last_line = time.monotonic()
        is_off = not (is_terminal(sys.stderr) and total_bytes)
        self._bar: Any = tqdm(
            total=total_bytes, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, disable=is_off
        )

    def copy(self, source: IO[bytes], sink: IO[bytes]) -> None:
        """Copy a stream and count its bytes."""
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            self.advance(len(chunk))

    def advance(self, num_bytes: int) -> None:
        """Count received bytes."""
        self.position += num_bytes
        self.received_bytes += num_bytes
        now = time.monotonic()
        self._bar.update(num_bytes)
        if self._bar.disable and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_line()

    def move_to(self, position: int) -> None:
        """Set the position without counting bytes: forwards over existing bytes, back when bytes are received again."""
        self._bar.initial, self._bar.n = position - self.received_bytes, position
        self._bar.refresh()
        self.position = position

    def note(self, line: str) -> None:
        """Print a line without disturbing the progress bar."""
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.close()

    def summary(self) -> str:
        """Return the size and speed of this run, such as `42.9 MB in 1.2 s (35.7 MB/s)`."""
        seconds = max(time.monotonic() - self._started, 1e-3)
        megabytes = self.received_bytes / 1e6
        return f"{megabytes:.1f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s)"

    def _print_line(self) -> None:
        rate = self.received_bytes / max(time.monotonic() - self._started, 1e-3)
        left_min = max(self._total_bytes - self.position, 0) / max(rate, 1.0) / 60
        self.note(
            f"  {self.position / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB "
            f"({100 * self.position / max(self._total_bytes, 1):.0f} %), {rate / 1e6:.1f} MB/s, {left_min:.0f} min left"
        )
