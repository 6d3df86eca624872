"""Positions of a DJI drone, from the SRT file that it writes beside a film."""

import re
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from yolo_seg_ddp.utils.files import read_text

CUE = re.compile(r"(\d+):(\d\d):(\d\d)[,.](\d{3}) *--> *(\d+):(\d\d):(\d\d)[,.](\d{3})|\Z")
NUMBER = r"(-?\d+(?:\.\d+)?)"
FIELDS = {  # as its drones write them; `longtitude` is DJI's spelling
    "latitude": re.compile(rf"\blatitude\s*: *{NUMBER}"),
    "longitude": re.compile(rf"\blong(?:i|ti)tude\s*: *{NUMBER}"),
    "height_m": re.compile(rf"\b(?:rel_alt|BAROMETER|Hb|H)\s*[:( ] *{NUMBER}"),
    "altitude_m": re.compile(rf"\b(?:abs_alt|altitude)\s*[: ] *{NUMBER}"),
}
# Longitude, latitude, number of satellites. Where the third number has decimals or an M, it is a
# height, as an Avata 2 and a Matrice 300 write it, and the latitude comes first.
PLACE = re.compile(rf"\b(?:GPS|RTK) *\( *{NUMBER} *, *{NUMBER} *, *(-?\d+)(\.\d+ *[mM]?|[mM])?")
# times are rounded to milliseconds; how long a place counts after its time
CLOCK_S, KEPT_S = 0.002, 1.0


class Positions:
    """What the SRT file beside a film says, if there is one.

    Raises UserError if the file is not UTF-8.
    """

    def __init__(self, film: Path) -> None:
        self.file = next(
            (path for end in (".SRT", ".srt") if (path := film.with_suffix(end)).is_file()), None
        )
        text = read_text(self.file) if self.file else ""
        # from and until when, in seconds
        self._entries: list[tuple[float, float, dict[str, float]]] = []
        for cue, following in pairwise(CUE.finditer(text)):
            numbers = [int(part) for part in cue.groups()]
            start_s, end_s = (
                3600 * h + 60 * m + s + ms / 1000 for h, m, s, ms in (numbers[:4], numbers[4:])
            )
            self._entries.append((start_s, end_s, place_of(text[cue.end() : following.start()])))
        self._entries.sort(key=lambda entry: entry[0])

    def at(self, time_s: float) -> dict[str, float]:
        """Return latitude and longitude in degrees, height above take-off and altitude in m, as far
        as they are known.
        """
        number = bisect_right(self._entries, time_s + CLOCK_S, key=lambda entry: entry[0])
        return (
            self._entries[number - 1][2]
            if number and time_s <= self._entries[number - 1][1] + KEPT_S
            else {}
        )


def place_of(text: str) -> dict[str, float]:
    """Return the fields of an entry's text; none without a valid position.

    A drone writes zeros before it has one.
    """
    fields = {
        name: float(match[1]) for name, pattern in FIELDS.items() if (match := pattern.search(text))
    }
    if place := PLACE.search(text):
        names = ("latitude", "longitude") if place[4] else ("longitude", "latitude")
        fields |= {name: float(place[number]) for number, name in enumerate(names, 1)}
    latitude, longitude = fields.get("latitude", 0.0), fields.get("longitude", 0.0)
    return (
        fields if (latitude or longitude) and abs(latitude) <= 90 and abs(longitude) <= 180 else {}
    )
