from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.evaluation.made_up import made_up_results
from utils.evaluation.metrics import ImageResult, calibration, operating_points
from utils.evaluation.metrics.confidence import CALIBRATION_MIN_CONFIDENCE

NAMES = ("pole", "crossarm", "insulator", "absent")


@pytest.mark.parametrize("seed", range(4))
def test_the_best_threshold_is_the_one_that_trying_all_finds(seed: int) -> None:
    results = made_up_results(seed)
    points = operating_points(results, NAMES)
    for kind in ("box", "mask"):
        for class_id in range(3):
            mine = [
                (float(score), bool(getattr(one, f"{kind}_hits")[row, 0]))
                for one in results
                for row, score in enumerate(one.scores)
                if one.class_ids[row] == class_id
            ]
            num_targets = sum(int((one.target_class_ids == class_id).sum()) for one in results)
            tried = []
            for threshold in {score for score, _ in mine}:
                kept = [hit for score, hit in mine if score >= threshold]
                tried.append((2 * sum(kept) / (len(kept) + num_targets), threshold, sum(kept), len(kept)))
            f1, threshold, found, kept_count = max(tried)
            point = points[kind][class_id]
            assert point is not None
            assert point["f1"] == pytest.approx(f1)
            assert (point["threshold"], point["num_hits"]) == (threshold, found)
            assert point["precision"] == found / kept_count
            assert point["recall"] == found / num_targets
            assert point["num_missed"] + found == num_targets
            assert point["num_false"] + found == kept_count
        assert points[kind][3] is None, "a class without targets has no threshold"


def test_calibration_is_nought_when_confidence_is_the_share_of_hits_and_the_gap_otherwise() -> None:
    hits = np.zeros((20, 10), bool)
    hits[:16, 0] = True  # 80 % of twenty detections
    nothing = np.zeros((0, 2), np.int64)

    def of(confidence: float) -> dict[str, dict[str, Any]]:
        scores = np.full(20, confidence, np.float32)
        result = ImageResult(0, scores, np.zeros(20), hits, ~hits & False, np.zeros(20), nothing)
        return calibration([result])

    assert of(0.8)["box"]["error"] == pytest.approx(0, abs=1e-6)
    sure = of(0.95)
    assert sure["box"]["error"] == pytest.approx(0.15, abs=1e-6)
    assert sure["box"]["excess"] == pytest.approx(0.15, abs=1e-6)
    assert of(0.6)["box"]["excess"] == pytest.approx(-0.2, abs=1e-6)
    assert sure["mask"]["error"] == pytest.approx(0.95, abs=1e-6), "no mask was hit"
    assert [row["num_detections"] for row in sure["box"]["bins"]] == [0] * 9 + [20]
    unlikely = of(CALIBRATION_MIN_CONFIDENCE / 2)["box"]
    assert (unlikely["error"], unlikely["excess"], unlikely["num_detections"]) == (None, None, 0)


def test_calibration_agrees_with_a_loop_over_bins_and_is_plain_json() -> None:
    results = made_up_results(9)
    found = calibration(results)
    pairs = [
        (float(s), bool(h))
        for one in results
        for s, h in zip(one.scores, one.mask_hits[:, 0], strict=True)
        if s >= 0.05
    ]
    gaps = 0.0
    for low in range(10):
        mine = [pair for pair in pairs if min(int(pair[0] * 10), 9) == low]
        gaps += abs(sum(score for score, _ in mine) - sum(hit for _, hit in mine))
    assert found["mask"]["error"] == pytest.approx(gaps / len(pairs))
    assert sum(row["num_detections"] for row in found["mask"]["bins"]) == len(pairs)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
