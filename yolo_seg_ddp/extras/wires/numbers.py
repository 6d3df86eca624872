"""The numbers of this extra in one place: what each one means, its unit, and the measurement that
keeps it.

Headings in quotes are those of docs/research/wires.md, which compares with other values under
"Fewer numbers" where none is named. "Not measured alone": no comparison without this number is
documented.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LineNumbers:
    """Lengths in widths are multiples of a line's width.

    Confidences and shares go from 0 to 1, contrasts from 0 to 255.
    """

    # Lines in a mask (`from_mask.py`): together they bring "What the shape alone brings".
    # of the slices of a mask, and of the samples of a line; not measured alone
    step_px: float = 4.0
    min_gap_px: float = 16.0  # of a gap along a line: a shorter one is the mask's ragged edge
    further_share: float = 0.15  # of a mask's pixels, so that they are a further line
    # how far beside a line its pixels and the wire are looked for; not measured alone
    reach_widths: float = 1.5
    # between places where a parabola is bent: for wires over several spans
    knot_widths: float = 16.0
    min_length_widths: float = 4.0  # of a line: a shorter one has no direction
    # of a mask's pixels near its line, or near its medial axis if it is a curved band
    band_share: float = 0.9
    max_turn: float = 0.5  # radians by which a curved band turns in two widths
    # The wire in the photograph (`in_photo.py`): "Lines on the wire that the photograph shows".
    block_px: float = 40.0  # of the line, averaged for one profile across it
    min_width_px: float = 4.0  # with which profiles across a thinner line are made
    # How much a line looks like a wire (`likeness`): nine forms differ by less than 0.03 in AP50
    # ("Wires as lines").
    noise: float = 6.0  # a contrast that says nothing: "Another place"
    # of the photograph's longer side: a line as long as this has 63 % of its confidence; nine forms
    short: float = 0.1
    # Confidence and ends (`confidence.py`, `replacing.py`, `routes.py`).
    min_score: float = 0.05  # of a detection that becomes a line: limits the time
    # of an object at which wires end ("One learned judge"), and of lines whose width counts
    sure: float = 0.5
    end_votes: float = 0.2  # of a line's median vote, where it ends: "One learned judge"
    wider: float = 1.5  # times the median width: a wider line is less sure
    # sine of the angle at which a line counts 1 / e for another, and up to which it continues it
    parallel: float = 0.2
    # of the photograph's longer side, assumed to run as labels do: "Wires that run alike"
    assumed: float = 0.2
    continued: float = 0.4  # exponent of the more confident line: "Lines that continue each other"
    # Facts of labels (`wire_labels.py`).
    # wires that go on after objects of a class, so that labels end there; not measured alone
    min_cuts: int = 3
    # labels whose width is compared with the photographs: limits the time of a start
    most_wires: int = 40
    min_labels: int = 10  # of a class, so that they say something of its wires; not measured alone
    # share of labels that say how parallel wires are: "Wires as lines" (0.55 and 0.88 on two days)
    usual: float = 0.8
    # share of length that runs alike, with which wires have a direction; not measured alone
    min_parallel: float = 0.2
    # more is not asked for, because two lines may cross: "Wires that run alike"
    max_parallel: float = 0.5


NUMBERS = LineNumbers()
