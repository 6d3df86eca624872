"""Evaluation of drawn photographs: on one rank and on several, in batches of any size, beside
faster-coco-eval.
"""

import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faster_coco_eval import COCO, COCOeval_faster

from evaluate_model import EvaluationConfig, choose_resolution
from tests.support.oracle import NAMES, SIZE_PX, Oracle, WithRegions, draw_photos, evaluate_oracle
from tests.support.ranks import run_ranks
from yolo_seg_ddp.data.dataset import Photo, Sample, SegmentationDataset, collate
from yolo_seg_ddp.data.images import write_jpeg
from yolo_seg_ddp.data.label_shapes import sizes_on_disk
from yolo_seg_ddp.data.labels import ANY_CLASS, count_searched, with_regions_of
from yolo_seg_ddp.data.polygons import SIZES, polygon_boxes
from yolo_seg_ddp.data.target_masks import draw_truth
from yolo_seg_ddp.evaluation import input_masks
from yolo_seg_ddp.evaluation.coco import CocoCollector, evaluate_with_faster_coco_eval
from yolo_seg_ddp.evaluation.evaluate import AP_LIMITS, Evaluation, PhotoPixels, match_batch_async
from yolo_seg_ddp.evaluation.input_masks import begin_mask_overlaps
from yolo_seg_ddp.evaluation.metrics.matching import IOU_THRESHOLDS
from yolo_seg_ddp.evaluation.metrics.results import (
    ImageResult,
    pack_results,
    pool_predictions,
    unpack_results,
)
from yolo_seg_ddp.evaluation.metrics.summary import (
    choose_worst,
    count_errors,
    summarise,
    summarise_sizes,
)
from yolo_seg_ddp.evaluation.metrics.thin_objects import ThinRule
from yolo_seg_ddp.evaluation.native_masks import outlines_in_photo, place
from yolo_seg_ddp.evaluation.shared_classes import only_classes
from yolo_seg_ddp.predict.detections import Detections, prototype_masks
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import SegmentationLoss

NUM_PHOTOS = 37
NATIVE = (
    *("native_mask_map50", "native_mask_map50_95"),
    *(
        "centreline_recall",
        "centreline_precision",
        "pieces_per_object",
        "length_px",
        "missed_px",
        "invented_px",
    ),
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    draw_photos(folder, NUM_PHOTOS)
    return folder


def evaluate_photos(
    folder: Path, num_photos: int, native: bool = False, **options: Any
) -> Evaluation:
    photos = draw_photos(folder, num_photos)
    thin = ThinRule(tuple(range(len(NAMES))) if native else ())
    options.setdefault("photo", PhotoPixels(sizes_on_disk(photos), native, thin=thin))
    return evaluate_oracle(photos, **options)


def partly_searched(photos: list[Photo]) -> list[Photo]:
    """Return photographs of which in every second one nobody looked for the first class."""
    whole = [np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)]
    return [
        photo
        if index % 2
        else with_regions_of(only_classes(photo, [1, 2]), np.zeros(1, np.int64), whole)
        for index, photo in enumerate(photos)
    ]


def several_sets(folder: Path) -> dict[str, Any]:
    """Evaluate sets of several sizes, also of fewer photographs than ranks: metrics and image ids
    of each.

    `own loss`: that of this rank's share of 7 photographs alone.
    """
    found = {f"{count}": evaluate_photos(folder, count) for count in (1, 2, 7, NUM_PHOTOS)}
    found["native"] = evaluate_photos(folder, 7, native=True)
    found["partly searched"] = evaluate_oracle(partly_searched(draw_photos(folder, 7)))
    found |= {
        f"regions {native}": evaluate_photos(folder, 7, native, regions=True)
        for native in (False, True)
    }
    answer = {
        name: {**one.metrics, "image_ids": [each.image_id for each in one.results]}
        for name, one in found.items()
    }
    own_loss = loss_of(folder, range(distributed.rank(), 7, distributed.world_size()))
    return {**answer, "own loss": own_loss, "coco": coco_files(folder)}


def coco_files(photographs: Path) -> list[str]:
    """Return the COCO files of 7 photographs that rank 0 writes; no rank sees the folder of
    another.
    """
    photos = draw_photos(photographs, 7)
    with tempfile.TemporaryDirectory() as folder:
        collector = CocoCollector(
            [photo.file for photo in photos], sizes_on_disk(photos), Path(folder)
        )
        pixels = PhotoPixels(collector.size_of, compare=True, on_masks=[collector.see_masks])
        evaluate_photos(photographs, 7, photo=pixels, on_image=[collector.see_image], regions=True)
        collector.gather()
        files = (
            [collector.write_predictions(), collector.write_ground_truth(NAMES)]
            if not distributed.rank()
            else []
        )
        return [file.read_text() for file in files]


def loss_of(folder: Path, indices: range) -> float:
    """Return the loss of some photographs of 7 as one batch."""
    photos = draw_photos(folder, 7)
    dataset, model = SegmentationDataset(photos, SIZE_PX), Oracle(photos)
    images, targets = prepare_batch(collate([dataset[(0, index)] for index in indices]), CPU)
    sums = SegmentationLoss(model).sums(model(images), targets)
    return float(sums.normalised(sums.normalisers).sum())


def numbers(value: Any, name: str = "") -> dict[str, float]:
    """Flatten nested metrics to numbers by path; what is None is left out."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            path: number
            for key, part in items
            for path, number in numbers(part, f"{name}/{key}").items()
        }
    return {} if isinstance(value, str) or value is None else {name: value}


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return several_sets(folder)


def test_the_set_is_neither_trivial_nor_hopeless(alone: dict[str, Any]) -> None:
    metrics = alone[str(NUM_PHOTOS)]
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95", "box_f1", "mask_f1"):
        assert 0.2 < metrics[name] < 0.9, name
    assert min(metrics["by_size"][size]["num_targets"] for size in SIZES) > 10


def test_every_number_is_the_same_on_one_rank_and_on_several(
    folder: Path, alone: dict[str, Any]
) -> None:
    answers = run_ranks(several_sets, 3, folder)
    expected, found = numbers(alone), [numbers(answer) for answer in answers]
    assert len(expected) > 400
    assert [answer["coco"] for answer in answers] == [alone["coco"], [], []]
    detections, truth = map(json.loads, alone["coco"])
    assert [json.dumps(content) for content in (detections, truth)] == alone["coco"]
    assert detections == sorted(detections, key=lambda one: (one["image_id"], -one["score"]))
    assert [one["id"] for one in truth["annotations"]] == [*range(1, 1 + len(truth["annotations"]))]
    loss = expected.pop("/own loss")
    assert alone["7"]["val_loss"] == pytest.approx(loss, rel=1e-6)
    # The shares differ, so that a mean of the ranks' means would be another number.
    assert abs(np.mean([values.pop("/own loss") for values in found]) - loss) > 1e-3 * loss
    for answer, values in zip(answers, found, strict=True):
        assert values == pytest.approx(expected, rel=1e-6, abs=1e-6)
        for count in (1, 2, 7, NUM_PHOTOS):
            assert answer[str(count)]["image_ids"] == list(range(count))
            assert answer[str(count)]["num_images"] == count


def test_without_masks_in_scores_all_are_higher_and_other_detections_come_first(
    folder: Path,
) -> None:
    limits = {**AP_LIMITS, "mask_score": False}
    plain, judged = (evaluate_photos(folder, 9, limits=one).results for one in (limits, AP_LIMITS))
    scores = [
        np.concatenate([np.sort(result.scores) for result in results])
        for results in (plain, judged)
    ]
    assert (scores[0] > scores[1]).all()
    assert (scores[1] > 0.5 * scores[0]).all()
    assert [result.class_ids.tolist() for result in plain] != [
        result.class_ids.tolist() for result in judged
    ]


def test_results_do_not_depend_on_the_batch_size(folder: Path) -> None:
    alone = evaluate_photos(folder, 9, batch_size=1).results
    assert sum(len(result.scores) for result in alone) > 20
    for batch_size in (4, 9):
        for one, other in zip(
            alone, evaluate_photos(folder, 9, batch_size=batch_size).results, strict=True
        ):
            for field in fields(ImageResult):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


@pytest.mark.parametrize("way", ["_shared_on_host", "_shared_on_device"])
def test_overlap_is_that_of_whole_masks(
    way: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = SegmentationDataset(draw_photos(folder, 6), SIZE_PX)
    samples = [dataset[(0, index)] for index in range(6)]
    samples = [
        replace(one, ignored=[*one.polygons[:2], *dataset[(0, 3)].polygons[:1]]) for one in samples
    ]
    samples[4] = replace(samples[4], ignored=[])
    rng = torch.Generator().manual_seed(0)
    prototypes = torch.randn(6, 32, SIZE_PX // 4, SIZE_PX // 4, generator=rng)
    found = []
    for count in (30, 0, 1, 7, 0, 12):
        low, extent = (torch.rand(count, 2, generator=rng) * SIZE_PX for _ in range(2))
        ones = torch.ones(count)
        boxes = torch.cat([low - 20, low + extent], 1)
        found.append(Detections(boxes, ones, ones.long(), torch.randn(count, 32, generator=rng)))
    monkeypatch.setattr(input_masks, "_shared_on_host", getattr(input_masks, way))
    overlaps = begin_mask_overlaps(samples, found, prototypes)()
    for sample, detections, maps, (iou, areas) in zip(
        samples, found, prototypes, overlaps, strict=True
    ):
        truth = (
            draw_truth(sample.polygons, SIZE_PX)
            == np.arange(1, len(sample.polygons) + 1)[:, None, None]
        )
        masks = prototype_masks(maps, detections, SIZE_PX).numpy()
        shared = np.einsum("myx,nyx->mn", truth.astype(np.float32), masks.astype(np.float32))
        union = truth.sum((1, 2))[:, None] + masks.sum((1, 2)) - shared
        drawn = [draw_truth([one], SIZE_PX) > 0 for one in sample.ignored]
        regions = np.array(drawn, bool).reshape(-1, *masks.shape[1:])
        shares = (regions[:, None] & masks).sum((2, 3)) / masks.sum((1, 2)).clip(1)
        expected = np.concatenate([shared / np.maximum(union, 1e-7), shares])
        np.testing.assert_allclose(iou, expected, rtol=1e-6)
        assert areas.tolist() == (masks.sum((1, 2)) * 16.0).tolist()
    assert max(iou.max() for iou, _ in overlaps if iou.size) > 0.1


@pytest.mark.parametrize(
    ("photo_size", "expected"),
    [((128, 96), "small"), ((512, 384), "medium"), ((1280, 960), "large")],
)
def test_a_false_alarm_counts_in_the_size_that_its_mask_has_in_the_photograph(
    photo_size: tuple[int, int], expected: str
) -> None:
    nothing = np.zeros((0, 4), np.float32)
    image = np.zeros((128, 128, 3), np.uint8)
    sample = Sample(
        0, image, np.zeros(0, np.int64), nothing, np.zeros((32, 32)), [], (128, 96), (0, 16)
    )
    one = torch.ones(1)
    # 20 x 20 pixels
    alarm = Detections(torch.tensor([[40.0, 40, 60, 60]]), one, one.long(), torch.ones(1, 32))
    ends = match_batch_async(
        [sample], [alarm], torch.ones(1, 32, 32, 32), 2, PhotoPixels(lambda _: photo_size)
    )
    (result,) = ends()
    assert {SIZES[place] for place in (*result.mask_sizes.flat, *result.box_sizes.flat)} == {
        expected
    }


@pytest.mark.parametrize("in_photo", [False, True])
def test_an_object_without_an_outline_counts_for_boxes_alone(in_photo: bool) -> None:
    """A mask on an object that has a box and no outline is neither right nor wrong."""
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    outlines = [(low + 40 * corners).astype(np.float32) for low in (16, 72)]
    boxes = np.array([[16, 16, 56, 56], [72, 72, 112, 112]], np.float32)
    sample = Sample(
        0,
        np.zeros((128, 128, 3), np.uint8),
        np.zeros(2, np.int64),
        boxes,
        np.zeros((32, 32)),
        outlines,
        (128, 128),
        boxed=np.array([1]),
    )
    seen = torch.cat([torch.from_numpy(boxes), torch.tensor([[4.0, 60, 44, 100]])])
    scores, ids = torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3, dtype=torch.int64)
    photo = PhotoPixels(lambda _: (256, 256), compare=in_photo, thin=ThinRule((0,)))

    def result_of(count: int, given: Sample = sample) -> ImageResult:
        found = Detections(seen, scores, ids, torch.ones(3, 32))[slice(count)]
        (result,) = match_batch_async([given], [found], torch.ones(1, 32, 32, 32), 1, photo)()
        return result

    result = result_of(3)
    assert result.box_hits[:, 0].tolist() == [True, True, False]
    assert result.mask_hits[:, 0].tolist() == [True, False, False]
    assert result.mask_ignored.round(2).tolist() == [0, 1, 0]
    assert not result.box_ignored.any()
    scores_of = [summarise([result_of(count)], ["a"]) for count in (1, 2, 3)]
    assert [one["mask_map50"] for one in scores_of] == pytest.approx([1, 1, 1], abs=0.01)
    assert [one["box_map50"] for one in scores_of] == pytest.approx([0.5, 1, 1], abs=0.01)
    assert scores_of[2]["mask_precision"] < 1, "the false alarm"
    sizes = summarise_sizes([result], ["a"])
    assert sizes["medium"]["mask_map50"] == pytest.approx(1, abs=0.01)
    no_outline = result_of(3, replace(sample, boxed=np.arange(2)))
    assert summarise([no_outline], ["a"])["mask_map50"] == 0
    assert summarise_sizes([no_outline], ["a"])["medium"]["mask_map50"] is None
    assert [row["num_outlined"] for row in summarise([result], ["a"])["per_class"]] == [1]

    # Where no object has an outline, a false alarm of masks would be the only thing that counts.
    assert no_outline.mask_ignored.tolist() == [1, 1, 1]
    assert len(result.centrelines) == in_photo
    assert not no_outline.centrelines.any()
    is_right, is_counted = no_outline.judged()
    assert [is_right.tolist(), is_counted.tolist()] == [[True, True, False], [True] * 3]
    assert (
        summarise([result_of(1, replace(sample, boxed=np.arange(0)))], ["a"])
        .keys()
        .isdisjoint(["num_outlined"])
    )
    assert unpack_results(pack_results([result]))[0].boxed.tolist() == [False, True]


def test_sizes_divide_the_targets_and_knowing_them_changes_nothing_else(
    folder: Path, alone: dict[str, Any]
) -> None:
    plain = evaluate_photos(folder, NUM_PHOTOS, photo=None).metrics
    sized = {
        name: value
        for name, value in alone[str(NUM_PHOTOS)].items()
        if name not in ("by_size", "image_ids")
    }
    for row in sized["per_class"]:
        # not judged at the input's resolution
        assert {name: row.pop(name) for name in NATIVE} == dict.fromkeys(NATIVE)
    assert plain == sized
    by_size = alone[str(NUM_PHOTOS)]["by_size"]
    assert sum(by_size[size]["num_targets"] for size in SIZES) == plain["num_targets"]
    assert len({by_size[size]["mask_map50_95"] for size in SIZES}) == len(SIZES)


def test_native_metrics_are_named_per_class(alone: dict[str, Any]) -> None:
    rows, ignoring = (alone[name]["per_class"] for name in ("native", "regions True"))
    for name, is_less in (("length_px", False), ("missed_px", False), ("invented_px", True)):
        assert (sum(row[name] for row in ignoring) < sum(row[name] for row in rows)) == is_less
    for row in rows:
        assert row["native_mask_map50"] == row["mask_map50"]
        assert row["native_mask_map50_95"] == row["mask_map50_95"]
        assert 0 < row["centreline_recall"] < 1
        assert 0 < row["centreline_precision"] < 1
        assert row["pieces_per_object"] >= 1


def coco_precision(results: list[ImageResult], kind: str, class_id: int) -> np.ndarray:
    """Return the precision at 101 recalls as COCO's tools define it, (10, 101), from what was
    matched and ignored.
    """
    pool = pool_predictions(results)
    mine = pool["class_ids"] == class_id
    hits, shares = pool[f"{kind}_hits"][mine].astype(bool), pool[f"{kind}_ignored"][mine]
    num_targets = (pool["target_class_ids"] == class_id).sum()
    rows = np.zeros((10, 101))
    for row, hit, threshold in zip(rows, hits.T, IOU_THRESHOLDS, strict=True):
        found = hit[hit | (shares < threshold)].cumsum()
        precision = np.maximum.accumulate((found / np.arange(1, len(found) + 1))[::-1])[::-1]
        place = np.searchsorted(found / num_targets, np.linspace(0, 1, 101))
        row[:] = np.append(precision, 0)[place]
    return rows


@pytest.mark.parametrize("regions", [False, True])
def test_native_results_agree_with_faster_coco_eval(
    folder: Path, tmp_path: Path, regions: bool
) -> None:
    photos = draw_photos(folder, NUM_PHOTOS)
    size_of = sizes_on_disk(photos)
    collector = CocoCollector([photo.file for photo in photos], size_of, tmp_path)
    pixels = PhotoPixels(size_of, compare=True, on_masks=[collector.see_masks])
    options: dict[str, Any] = {
        "photo": pixels,
        "on_image": [collector.see_image],
        "regions": regions,
    }
    evaluation = evaluate_photos(folder, NUM_PHOTOS, **options)
    ours = evaluation.metrics
    collector.gather()
    files = collector.write_ground_truth(NAMES), collector.write_predictions()
    ground_truth, predictions = (json.loads(file.read_bytes()) for file in files)
    coco = evaluate_with_faster_coco_eval(*files)
    crowds = [one["iscrowd"] for one in ground_truth["annotations"]]
    assert len(crowds) - sum(crowds) == ours["num_targets"] > 100
    drawn = WithRegions(photos, SIZE_PX)
    ids = np.concatenate([drawn[(0, index)].ignored_ids for index in range(NUM_PHOTOS)])
    assert sum(crowds) == (np.where(ids == ANY_CLASS, len(NAMES), 1).sum() if regions else 0)
    truth = COCO(str(tmp_path / "ground_truth.json"))
    for kind, iou_type, hidden in (("box", "bbox", ""), ("mask", "segm", "bbox")):
        entries = [{name: one[name] for name in one if name != hidden} for one in predictions]
        judge = COCOeval_faster(truth, truth.loadRes(entries), iou_type)
        judge.run()
        for class_id in range(len(NAMES)):
            # at all thresholds and recalls
            expected = judge.eval["precision"][:, :, class_id, 0, -1]
            np.testing.assert_allclose(
                coco_precision(evaluation.results, kind, class_id), expected, atol=1e-9
            )
        pool = pool_predictions(evaluation.results)
        is_ignored = (pool[f"{kind}_hits"] == 0) & (
            pool[f"{kind}_ignored"][:, None] >= IOU_THRESHOLDS
        )
        assert is_ignored.sum(axis=0).min() > 9 if regions else not is_ignored.any()
    assert [(one["width"], one["height"]) for one in ground_truth["images"]] == [
        *map(size_of, range(NUM_PHOTOS))
    ]
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95"):
        assert 0.2 < ours[name] < 0.9
        assert ours[name] == pytest.approx(coco[name], abs=0.005), name
    for size in SIZES:
        for name in ("box_map50_95", "mask_map50_95"):
            assert ours["by_size"][size][name] == pytest.approx(
                coco["by_size"][size][name], abs=0.005
            ), (size, name)


def test_faster_coco_eval_takes_no_box_for_a_rectangular_mask(folder: Path, tmp_path: Path) -> None:
    """In every second photograph no object has an outline, in others every third has none."""
    full = draw_photos(folder, NUM_PHOTOS)
    photos = []
    for index, photo in enumerate(full):
        boxed = np.arange(len(photo.polygons))[:: 3 if index % 2 else 1]
        corners = polygon_boxes(photo.polygons)[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
        polygons = [
            corners[number] if number in boxed else outline
            for number, outline in enumerate(photo.polygons)
        ]
        photos.append(replace(photo, polygons=polygons, boxed=boxed))
    size_of = sizes_on_disk(photos)
    collector = CocoCollector([photo.file for photo in photos], size_of, tmp_path)
    pixels = PhotoPixels(size_of, compare=True, on_masks=[collector.see_masks])
    ours = evaluate_oracle(photos, known=full, photo=pixels, on_image=[collector.see_image]).metrics
    collector.gather()
    coco = evaluate_with_faster_coco_eval(
        collector.write_ground_truth(NAMES), collector.write_predictions()
    )
    assert 30 < ours["num_outlined"] < ours["num_targets"] / 2
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95"):
        assert 0.2 < ours[name] < 0.9
        assert ours[name] == pytest.approx(coco[name], abs=0.005), name


@pytest.mark.parametrize("native", [False, True])
def test_a_class_is_judged_where_somebody_looked_for_it(folder: Path, native: bool) -> None:
    full = draw_photos(folder, NUM_PHOTOS)
    photos = partly_searched(full)
    assert count_searched(photos, len(NAMES)).tolist() == [NUM_PHOTOS // 2, NUM_PHOTOS, NUM_PHOTOS]
    pixels = PhotoPixels(sizes_on_disk(full), native)
    every = evaluate_oracle(full, photo=pixels).results
    some = summarise([one for one in every if one.image_id % 2], NAMES)["per_class"]
    expected = [some[0], *summarise(every, NAMES)["per_class"][1:]]
    judged = evaluate_oracle(photos, known=full, photo=pixels).metrics["per_class"]
    assert min(row["mask_map50_95"] for row in judged) > 0.1
    for row, wanted in zip(judged, expected, strict=True):
        # On the grid an object that is not labelled covers no mask of the other classes.
        kinds = ("box", "mask", "num") if native or row is judged[0] else ("box", "num")
        names = [
            name
            for name in wanted
            if name.startswith(kinds) and name.endswith(("map50", "map50_95", "num_targets"))
        ]
        assert {name: row[name] for name in names} == {name: wanted[name] for name in names}


def test_coco_files_of_a_split_without_any_detection_can_be_judged(
    folder: Path, tmp_path: Path
) -> None:
    photos = draw_photos(folder, 1)
    collector = CocoCollector([photo.file for photo in photos], sizes_on_disk(photos), tmp_path)
    sample = SegmentationDataset(photos, SIZE_PX)[(0, 0)]
    nothing = Detections(
        torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 32)
    )
    collector.see_image(sample, nothing, torch.zeros(32, SIZE_PX // 4, SIZE_PX // 4))
    collector.gather()
    metrics = evaluate_with_faster_coco_eval(
        collector.write_ground_truth(NAMES), collector.write_predictions()
    )
    assert metrics["box_map50"] == metrics["mask_map50_95"] == 0


def test_labels_come_back_to_the_photograph_on_disk_from_a_shrunk_copy_of_another_ratio(
    tmp_path: Path,
) -> None:
    # decoded at half of it, 544 x 815, and shrunk to 214 x 320; 1087 * 320 / 1630 is 213.4
    size = (1087, 1630)
    write_jpeg(tmp_path / "a.jpg", np.full((*size[::-1], 3), 128, np.uint8))
    outline = np.array([(0.1, 0.9), (0.97, 0.9), (0.97, 0.905)], np.float32)
    photos = [Photo(tmp_path / "a.jpg", np.zeros(1, np.int64), [outline])]
    sample: Sample = SegmentationDataset(photos, 320)[(0, 0)]
    assert sample.inner_size == (214, 320)
    placement = place(sample, sizes_on_disk(photos)(0))
    np.testing.assert_allclose(outlines_in_photo(sample, placement)[0], outline * size, atol=0.01)
    boxes = placement.boxes_to_photo(torch.from_numpy(sample.boxes)).numpy()
    np.testing.assert_allclose(boxes[0], [*(outline[0] * size), *(outline[2] * size)], atol=0.01)


WINDOWS = {"per_photo": 8, "low_scale": 0.5, "high_scale": 1.0}


@pytest.mark.parametrize(
    ("windows", "options", "resolution"),
    [
        (None, {}, "proto"),
        (WINDOWS, {}, "native"),
        (WINDOWS, {"tiles": "off"}, "proto"),
        (WINDOWS, {"mask_resolution": "proto"}, "proto"),
        (None, {"mask_resolution": "native"}, "native"),
        (None, {"tiles": "640"}, "native"),
        (None, {"thin_classes": ("wire",)}, "native"),
        (None, {"centreline_tolerance": 5.0}, "native"),
    ],
)
def test_masks_are_compared_in_photograph_pixels_after_windows_and_where_an_option_asks(
    windows: dict[str, float] | None, options: dict[str, Any], resolution: str
) -> None:
    other, model = (SimpleNamespace(args={"windows": facts}) for facts in (None, windows))
    config = EvaluationConfig(model="a.pt", compare="b.pt", **options)
    assert choose_resolution(config, [other, model]).mask_resolution == resolution  # type: ignore[list-item]


def test_the_errors_of_all_images_are_those_of_the_confusion_matrix(folder: Path) -> None:
    found = evaluate_photos(folder, 9)
    errors = count_errors(found.results, len(NAMES), draw_photos(folder, 9))
    matrix = np.array(found.metrics["confusion_matrix"])
    inside = matrix[:-1, :-1]
    assert sum(row["missed"] for row in errors) == matrix[-1].sum() > 0
    assert sum(row["false"] for row in errors) == matrix[:, -1].sum() > 0
    assert sum(row["confused"] for row in errors) == inside.sum() - np.trace(inside) > 0


def test_the_worst_images_are_those_with_the_most_errors_of_each_kind() -> None:
    def row(image_id: int, missed: int, false: int, confused: int) -> dict[str, int]:
        return {
            "image_id": image_id,
            "num_targets": 9,
            "missed": missed,
            "false": false,
            "confused": confused,
        }

    rows = [
        row(0, 0, 0, 0),
        row(1, 1, 0, 0),
        row(2, 0, 1, 0),
        row(3, 0, 0, 1),
        row(4, 3, 3, 0),
        row(5, 2, 2, 0),
    ]
    assert [one["image_id"] for one in choose_worst(rows, 3)] == [4, 5, 3], (
        "also the only one with a confusion"
    )
    assert [one["image_id"] for one in choose_worst(rows, 99)] == [4, 5, 1, 2, 3], (
        "never one without errors"
    )
