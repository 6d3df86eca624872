"""The profile's table and what it leaves out."""

from __future__ import annotations

from dataclasses import replace

from tests.measure.made_up import profile
from utils.measure.profiling_report import missing_lines, profile_table


def test_what_no_tensor_holds_is_said_beyond_a_tenth_of_the_peak() -> None:
    whole = replace(profile(1, 10.0), allocated_bytes=100, memory_bytes={"weights": 30, "activations": 65})
    assert missing_lines([whole]) == []
    lines = missing_lines([replace(whole, allocated_bytes=200, reserved_bytes=300)])
    assert lines == [
        "Missing: 105 B at batch 1 (52% of the peak) in no tensor: workspaces of kernels and gaps between blocks"
    ]


def test_the_table_shows_reserved_memory_only_where_there_is_any() -> None:
    assert "peak RSS" in profile_table([profile(4, 60.0)])
    table = profile_table([profile(4, 60.0, reserved_bytes=3 * 2**30)])
    assert "tensors" in table
    assert "3.0 GiB" in table
    assert "peak RSS" not in table
