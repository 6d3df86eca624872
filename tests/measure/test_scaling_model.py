"""The model behind benchmark_ddp.py's predictions: the cost of an all-reduce, what is fitted, what follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from utils.measure.interconnect import PRESETS, Link, bus_gb_per_s, fit_link, link_for
from utils.measure.scaling_model import expected_maximum, fit_model, predict, prediction_table

LINK = Link("truth", 20.0, 5.0, "made up")


def allreduce_points(counts: tuple[int, ...] = (2, 4), noise: float = 0.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"processes": count, "bytes": size, "ms": LINK.allreduce_ms(count, size) * (1 + noise * rng.normal())}
        for count in counts
        for size in (2**10, 2**14, 2**18, 2**22, 2**26)
    ]


def row(count: int, **values: Any) -> dict[str, Any]:
    """A weak-scaling row: 90 ms of compute, 30 ms all-reduce of 13 MB by itself, a third of it exposed."""
    blank = {
        "scaling": "weak",
        "processes": count,
        "global_batch_size": 8 * count,
        "images_per_s": 80.0 * count,
        "compute_ms": 90.0,
        "data_ms": 10.0,
        "waiting_ms": 0.0 if count == 1 else 2.0,
        "backward_ms": 50.0,
        "overlap": None if count == 1 else 2 / 3,
        "gradient_bytes": 13e6,
        "other_collectives": 0.0 if count == 1 else 2.0,
        "other_bytes": 0.0 if count == 1 else 40e3,
    }
    return {**blank, **values}


def test_a_ring_costs_latency_for_each_step_and_bandwidth_for_each_byte() -> None:
    assert LINK.allreduce_ms(1, 1e9) == 0
    assert LINK.allreduce_ms(2, 0) == pytest.approx(2 * 0.020)
    assert LINK.allreduce_ms(8, 5e9, messages=3) == pytest.approx(3 * 14 * 0.020 + 14 / 8 * 1000)
    assert bus_gb_per_s(8, 5e9, 14 / 8 * 1000) == pytest.approx(5)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_fit_finds_the_link_that_made_the_measurements(noise: float) -> None:
    found = fit_link(allreduce_points(noise=noise))
    assert found is not None
    assert found.latency_us == pytest.approx(LINK.latency_us, rel=0.001 + noise)
    assert found.gb_per_s == pytest.approx(LINK.gb_per_s, rel=0.001 + noise)


def test_a_fit_never_gives_a_negative_latency() -> None:
    points = [{"processes": 2, "bytes": size, "ms": size**1.3 / 1e6} for size in (2**10, 2**16, 2**22)]
    found = fit_link(points)
    assert found is not None
    assert found.latency_us >= 0
    assert found.gb_per_s > 0
    assert fit_link([]) is None


def test_beyond_a_machine_the_slower_link_counts() -> None:
    nvlink, ethernet = PRESETS["nvlink4"], PRESETS["100gbe"]
    assert link_for(8, nvlink, ethernet) is nvlink
    assert link_for(9, nvlink, ethernet).gb_per_s == ethernet.gb_per_s
    slow = Link("slow", 50.0, 1.0, "made up")
    assert link_for(16, slow, ethernet).gb_per_s == 1.0
    assert link_for(16, slow, ethernet).latency_us == 50.0


def test_presets_stay_below_what_the_cable_carries() -> None:
    assert PRESETS["100gbe"].gb_per_s < 100 / 8
    assert PRESETS["nvlink4"].gb_per_s < 900 / 2
    assert all(link.source and link.latency_us > 0 for link in PRESETS.values())


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (2, 0.5642), (8, 1.4236), (64, 2.3437)])
def test_the_slowest_of_many_is_further_from_the_mean(count: int, expected: float) -> None:
    assert expected_maximum(count) == pytest.approx(expected, abs=1e-3)


def test_the_model_gives_back_what_it_was_fitted_to() -> None:
    model = fit_model([row(1), row(2)], allreduce_points((2,)))
    assert model.overlap == pytest.approx(2 / 3)
    assert model.step_ms(1, LINK) == pytest.approx(100)
    gradients_ms = LINK.allreduce_ms(2, 13e6, 8)  # in buckets of an eighth
    others_ms = LINK.allreduce_ms(2, 40e3, 2)
    assert model.step_ms(2, LINK) == pytest.approx(90 + 10 + 2 + gradients_ms / 3 + others_ms)


def test_the_backward_pass_hides_no_more_than_it_lasts() -> None:
    model = fit_model([row(1), row(2)], allreduce_points((2,)))
    snail = Link("snail", 0.0, 0.01, "made up")  # 13 MB take seconds
    exposed_ms = snail.allreduce_ms(64, 13e6) - 50
    waiting_ms = 2.0 * expected_maximum(64) / expected_maximum(2)
    blocking_ms = snail.allreduce_ms(64, 40e3, 2)
    assert model.step_ms(64, snail) == pytest.approx(100 + waiting_ms + blocking_ms + exposed_ms)


def test_predictions_are_marked_and_more_devices_never_more_efficient() -> None:
    rows = [row(1), row(2), row(2, scaling="strong")]
    model = fit_model(rows, allreduce_points((2,)))
    found = predict(model, rows, (8, 16, 64), LINK, PRESETS["10gbe"])
    kinds = [(line["processes"], line["kind"]) for line in found]
    assert kinds == [(1, "measured"), (2, "measured"), *((count, "PREDICTION") for count in (8, 16, 64))]
    efficiencies = [line["efficiency_model"] for line in found]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert [line["images_per_s_measured"] for line in found[2:]] == [None] * 3
    table = prediction_table(found).splitlines()
    assert sum("PREDICTION" in line for line in table) == 3
    assert "-" in table[-1].split()  # nothing measured


def test_strong_scaling_alone_predicts_from_the_work_of_the_whole_batch() -> None:
    rows = [row(1, scaling="strong"), row(2, scaling="strong", compute_ms=45.0, global_batch_size=8)]
    model = fit_model(rows, allreduce_points((2,)))
    assert (model.batch_size, model.compute_ms) == (8, 100)
