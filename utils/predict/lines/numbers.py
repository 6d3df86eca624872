"""The numbers of this room in one place: what each one means, its unit, and the measurement that keeps it.

Headings in quotes are those of docs/research/wires.md. "Not measured alone": no comparison without this number is documented.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LineNumbers:
    """Lengths in widths are multiples of a line's width. Confidences and shares go from 0 to 1, contrasts from 0 to 255."""

    # Lines in a mask (`from_mask.py`): together they bring "What the shape alone brings".
    step_px: float = 4.0  # of the slices of a mask, and of the samples of a line; not measured alone
    min_gap_px: float = 16.0  # of a gap along a line: a shorter one is the mask's ragged edge; not measured alone
    further_share: float = 0.15  # of a mask's pixels, so that they are a further line; not measured alone
    explained_share: float = 0.95  # of a mask's pixels near its line; with less, it may be a band; not measured alone
    max_guess_sag: float = 0.1  # of a parabola through three points, in its length; not measured alone
    reach_widths: float = 1.5  # how far beside a line its pixels and the wire are looked for; not measured alone
    knot_widths: float = 16.0  # between places where a parabola is bent; not measured alone
    min_length_widths: float = 4.0  # of a line: a shorter one has no direction; not measured alone
    band_share: float = 0.9  # of a mask's pixels near its medial axis, if it is a curved band; not measured alone
    max_turn: float = 0.5  # radians by which a curved band turns in two widths; not measured alone
    # The wire in the photograph (`in_photo.py`): "Lines on the wire that the photograph shows".
    block_px: float = 40.0  # of the line, averaged for one profile across it; not measured alone
    min_reach_px: float = 12.0  # to each side of a line, however thin; not measured alone
    ground_share: float = 0.2  # of a profile at each end, which shows the ground; not measured alone
    min_contrast: float = 12.0  # of a wire to the ground; not measured alone
    min_contrast_ratio: float = 2.0  # of that contrast to the ground's unevenness; not measured alone
    narrowest: float = 0.6  # that a line becomes in the photograph, in widths of its mask; not measured alone
    widest: float = 1.8  # that it becomes, in the same unit; not measured alone
    # How much a line looks like a wire (`likeness`): nine forms differ by less than 0.03 in AP50 ("Wires as lines").
    likeness_block_px: float = 20.0  # of the line, averaged for one profile; not measured alone
    min_width_px: float = 4.0  # with which profiles across a thinner line are made; not measured alone
    noise: float = 3.0  # a contrast that says nothing; area under the curve 0.89, that of the confidence 0.84
    short: float = 0.1  # of the photograph's longer side: a line as long as this has 63 % of its confidence; nine forms
    # Confidence and ends (`confidence.py`, `replacing.py`, `routes.py`).
    min_score: float = 0.05  # of a detection that becomes a line; less changes AP50 by 0.002
    sure: float = 0.5  # of an object at which wires end, and of lines whose width counts; not measured alone
    end_votes: float = 0.2  # of a line's median vote, where it ends: "One learned judge"
    wider: float = 1.5  # times the median width: precision +0.018 and +0.007, AP50 +0.010 and +0.011 ("Wires as lines")
    parallel: float = 0.2  # sine of the angle at which a line counts 1 / e for another: "Wires that run alike"
    counted: float = 0.2  # confidence from which a line says where wires run: "Wires that run alike"
    assumed: float = 0.2  # of the photograph's longer side, assumed to run as labels do: "Wires that run alike"
    least_share: float = 0.05  # added to shares of length, so that a lone line is not lost: "Wires that run alike"
    continued: float = 0.4  # exponent of the more confident line: "Lines that continue each other"
    longest_gap: float = 0.5  # of the photograph's longer side, between the two: recall +0.02 on two days
    max_kink_deg: float = 10.0  # between two lines that continue each other: "hardly matters"
    beside: float = 0.1  # of the gap, and a width: how far an end may lie beside the other line: "hardly matters"
    # Facts of labels (`label_facts.py`).
    min_cuts: int = 3  # wires that go on after objects of a class, so that labels end there; not measured alone
    most_wires: int = 40  # labels whose width is compared with the photographs: limits the time of a start
    min_labels: int = 10  # of a class, so that they say something of its wires; not measured alone
    max_gain: float = 2.0  # of the labelled width per visible width; not measured alone
    usual: float = 0.8  # share of labels that say how parallel wires are: "Wires as lines" (0.55 and 0.88 on two days)
    min_parallel: float = 0.2  # share of length that runs alike, with which wires have a direction; not measured alone
    max_parallel: float = 0.5  # more is not asked for, because two lines may cross: "Wires that run alike"


NUMBERS = LineNumbers()
