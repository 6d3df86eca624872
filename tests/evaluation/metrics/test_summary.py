"""The numbers of a whole set: Ultralytics' to 1e-6, and some known by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.evaluation.made_up import (
    image_result,
    one_image,
    random_results,
    random_scene,
    result_of,
)
from tests.support.plugin import PROJECT
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS, box_iou
from yolo_seg_ddp.evaluation.metrics.results import (
    ImageResult,
    merge_results,
    pack_results,
    unpack_results,
)
from yolo_seg_ddp.evaluation.metrics.summary import (
    calibration,
    operating_points,
    precision_counts,
    precision_recall_curves,
    summarise,
)
from yolo_seg_ddp.evaluation.tables import class_table

NAMES = ["conductor", "pole", "crossarm", "insulator", "cutouts"]


@pytest.mark.parametrize("seed", range(8))
def test_every_step_gives_the_numbers_of_ultralytics(seed: int) -> None:
    import torch
    from ultralytics.engine.validator import BaseValidator
    from ultralytics.utils import metrics as reference

    rng = np.random.default_rng(seed)
    num_classes = 3 + seed % 4
    names = {index: f"class {index}" for index in range(num_classes)}
    theirs: Any = reference.SegmentMetrics(names)
    matrix = reference.ConfusionMatrix(names)
    validator: Any = SimpleNamespace(iouv=torch.linspace(0.5, 0.95, 10))
    results = []
    for image_id in range(12):
        scene = random_scene(rng, num_classes)
        tensors = {name: torch.from_numpy(array) for name, array in scene.items()}
        result = result_of(image_id, scene, num_classes)
        results.append(result)
        iou = reference.box_iou(tensors["targets"], tensors["boxes"])
        np.testing.assert_allclose(box_iou(scene["targets"], scene["boxes"]), iou, atol=1e-6)
        hits = [
            BaseValidator.match_predictions(
                validator, tensors["ids"], tensors["target_ids"], iou * scale
            )
            if len(scene["ids"]) and len(scene["target_ids"])
            else torch.zeros(len(scene["ids"]), 10, dtype=torch.bool)
            for scale in (1, 0.9)
        ]
        np.testing.assert_array_equal(result.box_hits, hits[0])
        np.testing.assert_array_equal(result.mask_hits, hits[1])
        matrix.process_batch(
            {"cls": tensors["ids"], "conf": tensors["scores"], "bboxes": tensors["boxes"]},
            {"cls": tensors["target_ids"], "bboxes": tensors["targets"]},
        )
        theirs.update_stats(
            {
                "tp": hits[0].numpy(),
                "tp_m": hits[1].numpy(),
                "conf": scene["scores"],
                "pred_cls": scene["ids"],
                "target_cls": scene["target_ids"],
                "target_img": np.unique(scene["target_ids"]),
                "im_name": str(image_id),
            }
        )
    theirs.process()
    ours = summarise(results, list(names.values()))
    columns = ("precision", "recall", "map50", "map50_95")
    keys = [f"{kind}_{name}" for kind in ("box", "mask") for name in columns]
    expected = dict(zip(keys, theirs.mean_results(), strict=True))
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert ours["box_f1"] == pytest.approx(theirs.box.f1.mean(), abs=1e-6)
    assert ours["mask_f1"] == pytest.approx(theirs.seg.f1.mean(), abs=1e-6)
    # the problem is neither empty nor trivial
    assert 0.05 < ours["box_map50_95"] < ours["box_map50"] < 1
    for position, class_id in enumerate(theirs.ap_class_index):
        row = ours["per_class"][class_id]
        values = [row[name] for name in expected]
        assert values == pytest.approx(list(theirs.class_result(position)), abs=1e-6)
    assert [row["num_targets"] for row in ours["per_class"]] == theirs.nt_per_class.tolist()
    assert [row["num_images"] for row in ours["per_class"]] == theirs.nt_per_image.tolist()
    assert ours["confusion_matrix"] == matrix.matrix.astype(int).tolist()
    curves = precision_recall_curves(results, list(names.values()))
    assert curves["box"]["class_ids"].tolist() == list(theirs.ap_class_index)
    for kind, metric in (("box", theirs.box), ("mask", theirs.seg)):
        for name, attribute in (
            ("precision", "p_curve"),
            ("recall", "r_curve"),
            ("f1", "f1_curve"),
        ):
            np.testing.assert_allclose(curves[kind][name], getattr(metric, attribute), atol=1e-6)
        np.testing.assert_allclose(
            curves[kind]["precision_at_recall"], metric.prec_values, atol=1e-6
        )
        np.testing.assert_allclose(curves[kind]["average_precision"], metric.all_ap, atol=1e-6)


def test_order_and_owner_of_images_change_nothing_even_when_confidences_tie() -> None:
    rng = np.random.default_rng(4)
    results = random_results(4, num_images=20, decimals=1)
    expected = summarise(results, NAMES)
    for num_ranks in (2, 3):
        shuffled = [results[index] for index in rng.permutation(len(results))]
        parts = [shuffled[rank::num_ranks] for rank in range(num_ranks)]
        gathered = [unpack_results(pack_results(part)) for part in reversed(parts)]
        assert summarise(merge_results(gathered), NAMES) == expected
        assert summarise(shuffled, NAMES) == expected


@pytest.mark.parametrize("seed", range(3))
def test_what_is_ignored_leaves_all_numbers_but_no_hit_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ignored, left = [], []
    for one in random_results(seed, 30, decimals=2):
        box, mask = one.box_hits[:, 0], one.mask_hits[:, 0]
        kept = (one.box_hits | one.mask_hits).any(axis=1) | (rng.random(len(box)) < 0.4)
        box_share, mask_share = (np.where(kept, hit / 2, 1) for hit in (box, mask))
        ignored.append(replace(one, box_ignored=box_share, mask_ignored=mask_share))
        rows = {
            name: getattr(one, name)[kept]
            for name in ("scores", "class_ids", "box_hits", "mask_hits")
        }
        left.append(
            image_result(one.image_id, *rows.values(), one.target_class_ids, one.box_confusion)
        )
    assert sum(len(one.scores) for one in left) < sum(len(one.scores) for one in ignored) - 9
    for numbers in (
        summarise,
        precision_recall_curves,
        operating_points,
        lambda found, names: calibration(found),
        lambda found, names: precision_counts(found, len(names)),
    ):
        np.testing.assert_equal(numbers(ignored, NAMES), numbers(left, NAMES))


def test_a_detection_counts_at_the_highest_confidence_that_it_reaches() -> None:
    scores, hits = [0.991, 0.9, 0.3099, 0.0015], np.zeros((4, 10), bool)
    hits[:2, 0] = True
    results = [image_result(0, scores, [1, 1, 1, 0], ~hits, hits, [], [])]
    counts = np.array(precision_counts(results, 2)).reshape(2, 2, len(LEVELS))
    wrong, right = ([*LEVELS[of_kind.nonzero()[0]]] for of_kind in counts[1])
    np.testing.assert_allclose(wrong + right, [0.3, 0.9, 0.99])
    assert counts.sum(axis=2).tolist() == [[1, 0], [1, 2]]
    assert counts[0, 0, 0] == 1

    # A class of which an object has no outline is judged by its boxes.
    boxed = image_result(0, scores, [1, 1, 1, 0], ~hits, hits, [1], [], boxed=[True])
    counts = np.array(precision_counts([boxed], 2)).reshape(2, 2, len(LEVELS))
    assert counts.sum(axis=2).tolist() == [[1, 0], [2, 1]]


def test_classes_without_targets_do_not_count_in_the_means() -> None:
    good = one_image([0.9], [True])
    stray = image_result(1, [0.8], [1], np.zeros((1, 10)), np.zeros((1, 10)), [], [[1, 3]])
    missed = image_result(2, [], [], [], [], [2, 2], [[3, 2], [3, 2]])
    summary = summarise([good, stray, missed], ["pole", "crossarm", "insulator"])
    assert summary["box_map50"] == pytest.approx(0.995 / 2)
    assert [row["num_targets"] for row in summary["per_class"]] == [1, 0, 2]
    assert [row["num_images"] for row in summary["per_class"]] == [1, 0, 1]
    assert [row["box_map50"] for row in summary["per_class"]] == pytest.approx([0.995, 0, 0])
    assert class_table(summary).splitlines()[5].split()[3:5] == ["-", "0.000"], (
        "nothing found has no precision"
    )
    assert summary["confusion_matrix"][1][3] == 1
    assert summary["confusion_matrix"][3][2] == 2
    assert (summary["num_images"], summary["num_targets"]) == (3, 3)


@pytest.mark.parametrize(
    "results",
    [
        [],
        [image_result(0, [], [], [], [], [], [])],
        [image_result(0, [], [], [], [], [0, 4], [[5, 0], [5, 4]])],
        [image_result(0, [0.9], [1], np.zeros((1, 10)), np.zeros((1, 10)), [], [[1, 5]])],
    ],
    ids=["no images", "empty image", "no predictions", "no targets"],
)
def test_nothing_to_measure_gives_zeros_and_valid_json(results: list[ImageResult]) -> None:
    summary = summarise(results, NAMES)
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text) == summary
    for name in ("map50", "map50_95", "precision", "recall", "f1"):
        assert summary[f"box_{name}"] == summary[f"mask_{name}"] == 0
    curves = precision_recall_curves(results, NAMES)
    assert curves["box"]["precision_at_recall"].shape == (len(curves["box"]["class_ids"]), 1000)
    assert all(np.isfinite(curves["mask"][name]).all() for name in ("precision", "recall", "f1"))


def test_a_class_id_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="image 0: class id 7, but there are 5 classes"):
        summarise([image_result(0, [], [], [], [], [7], [])], NAMES)


def test_metrics_load_without_torch() -> None:
    code = (
        "import sys; from yolo_seg_ddp.evaluation.metrics import summary, thin_objects; "
        "sys.exit('torch' in sys.modules or 'ultralytics' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=PROJECT, timeout=60, check=False
        ).returncode
        == 0
    )
