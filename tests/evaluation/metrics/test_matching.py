"""Results of photographs, their matching with the truth, and the confidence that is best."""

import json
from typing import Any

import numpy as np
import pytest

from tests.evaluation.made_up import image_result, one_image, random_results
from yolo_seg_ddp.data.polygons import SIZES, size_classes
from yolo_seg_ddp.evaluation.metrics.matching import (
    IOU_THRESHOLDS,
    box_iou,
    confusion_pairs,
    hit_targets,
    ignored_shares,
    sizes_of_predictions,
)
from yolo_seg_ddp.evaluation.metrics.results import (
    ImageResult,
    merge_results,
    pack_results,
    unpack_results,
)
from yolo_seg_ddp.evaluation.metrics.summary import (
    CALIBRATION_MIN_CONFIDENCE,
    calibration,
    operating_points,
)


def test_image_result_refuses_arrays_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="image 7: scores"):
        image_result(7, [0.5, 0.4], [0], np.ones((1, 10)), np.ones((1, 10)), [], [])
    with pytest.raises(ValueError, match="image 7: box_hits has the shape"):
        image_result(7, [0.5], [0], np.ones((1, 9)), np.ones((1, 10)), [], [])
    with pytest.raises(ValueError, match="image 3: sizes are given for some"):
        image_result(3, [0.5], [0], np.ones((1, 10)), np.ones((1, 10)), [0], [], target_sizes=[1])


def test_incomplete_transfer_is_noticed() -> None:
    packed = pack_results(random_results(2))
    assert all(array.dtype not in (object, bool) for array in packed.values()), (
        "not every backend can send these"
    )
    packed["scores"] = packed["scores"][:-1]
    with pytest.raises(ValueError, match="scores has"):
        unpack_results(packed)


def test_merging_keeps_each_image_once_and_refuses_contradictions() -> None:
    results = random_results(3)
    merged = merge_results([results[6:], unpack_results(pack_results(results[:8]))])
    assert [result.image_id for result in merged] == list(range(12))
    other = one_image([0.5], [True], image_id=4)
    with pytest.raises(ValueError, match="image 4 was evaluated twice"):
        merge_results([results, [other]])


def test_box_iou_of_known_boxes() -> None:
    first = np.array([[0, 0, 10, 10], [5, 5, 5, 5]])
    second = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [20, 20, 30, 30], [5, 5, 5, 5]])
    np.testing.assert_allclose(box_iou(first, second), [[1.0, 1 / 3, 0.0, 0.0], [0.0] * 4])
    assert box_iou(np.zeros((0, 4)), np.zeros((3, 4))).shape == (0, 3)


def test_thresholds_are_hit_by_an_iou_equal_to_them() -> None:
    assert IOU_THRESHOLDS.tolist() == pytest.approx(
        [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    )
    for position, percent in enumerate(range(50, 100, 5)):
        hits = hit_targets(np.array([[percent / 100]]), np.array([0]), np.array([0])) >= 0
        assert hits.sum() == position + 1


def test_confusion_pairs_name_misses_and_false_alarms() -> None:
    iou = np.array([[0.9, 0.0, 0.8, 0.9], [0.1, 0.45, 0.0, 0.0]])
    scores = np.array([0.9, 0.8, 0.7, 0.25])  # the last is not above 0.25
    pairs = confusion_pairs(iou, np.array([0, 1]), np.array([0, 1, 0, 0]), scores, 5)
    # an IoU of 0.45 is not above 0.45
    assert sorted(pairs.tolist()) == [[0, 0], [0, 5], [1, 5], [5, 1]]
    shares = ignored_shares(
        np.array([[0.6, 0.46, 0.45], [0.9, 0.9, 0.9]]), np.array([-1, 2]), np.array([0, 1, 0])
    )
    assert shares.tolist() == pytest.approx([0.6, 0.46, 0.45])
    pairs = confusion_pairs(
        iou, np.array([0, 1]), np.array([0, 1, 0, 0]), scores, 5, np.append(shares, 0)
    )
    assert sorted(pairs.tolist()) == [[0, 0], [0, 5], [5, 1]], "a share of 0.45 is not above 0.45"
    assert confusion_pairs(
        np.zeros((0, 1)), np.zeros(0), np.array([4]), np.array([0.5]), 5
    ).tolist() == [[4, 5]]
    assert confusion_pairs(
        np.zeros((1, 0)), np.array([4]), np.zeros(0), np.zeros(0), 5
    ).tolist() == [[5, 4]]


def test_sizes_begin_at_32_and_96_pixels_squared() -> None:
    areas = np.array([0, 32**2 - 1, 32**2, 96**2 - 1, 96**2, 1e8])
    assert [SIZES[number] for number in size_classes(areas)] == ["small"] * 2 + ["medium"] * 2 + [
        "large"
    ] * 2


def test_a_hit_counts_where_its_target_does_and_a_false_alarm_by_its_own_size() -> None:
    hits = np.full((2, 10), -1)
    hits[0, :3] = 1
    sizes = sizes_of_predictions(hits, np.array([0, 2], np.uint8), np.array([1, 0], np.uint8))
    assert sizes.tolist() == [[2] * 3 + [1] * 7, [0] * 10]
    assert sizes_of_predictions(hits, np.zeros(0, np.uint8), np.array([1, 0])).tolist() == [
        [1] * 10,
        [0] * 10,
    ]


NAMES = ("pole", "crossarm", "insulator", "absent")


@pytest.mark.parametrize("seed", range(4))
def test_the_best_threshold_is_the_one_that_trying_all_finds(seed: int) -> None:
    results = random_results(seed, 30, 3, decimals=2)
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
                tried.append(
                    (2 * sum(kept) / (len(kept) + num_targets), threshold, sum(kept), len(kept))
                )
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
    results = random_results(9, 30, 3, decimals=2)
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
