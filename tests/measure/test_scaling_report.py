"""The table of scaling and its notes."""

from __future__ import annotations

from tests.measure.made_up import run
from utils.measure import scaling, scaling_report


def test_one_process_has_no_overlap_in_the_table() -> None:
    rows = scaling.summarise([run(1, 1, 10.0, overlap=None, net_overlap=None, ranges_share=1.0)])
    line = scaling_report.scaling_table(rows).splitlines()[-1].split()
    assert line[-3:] == ["100.0%", "-", "-"]
