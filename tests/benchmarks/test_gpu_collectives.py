"""What `make gpu` asks of the collectives. Apart from the other tests of it, so that the ranks import little."""

from __future__ import annotations

from benchmarks.gpu.all_collectives import COLLECTIVES, wrong_collectives
from tests.support.ranks import run_ranks
from utils.distributed import collectives


def test_every_collective_is_checked_and_right_on_two_ranks() -> None:
    documented = {
        name
        for name, value in vars(collectives).items()
        if callable(value) and "Every rank must reach this" in (value.__doc__ or "") and not name.startswith("_")
    }
    assert documented | {"barrier"} == COLLECTIVES.keys()
    assert run_ranks(wrong_collectives, 2) == [[], []]
