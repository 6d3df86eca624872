"""The optional parts of the recipe: labels stay on their pixels, what is off changes nothing, all ranks agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests.in_memory import InMemory
from utils.common.config import parse_config, to_dict
from utils.common.errors import UsageError
from utils.data import dataset as dataset_module
from utils.data.augment import AugmentConfig, Scene, blend, paste_mirrored, sample_generator
from utils.data.dataset import Batch, Photo, Sample, SegmentationDataset, collate, count_classes
from utils.data.loader import EpochBatches, get_dataloader, multi_scale_sizes
from utils.data.polygons import large_to_small
from utils.data.sample.canvas import area
from utils.data.target_masks import MASK_STRIDE
from utils.distributed.sync_bn import convert_sync_batchnorm
from utils.engine import EngineOptions, Epoch, Task, TrainingEngine
from utils.measure.synthetic import synthetic_batch
from utils.run.folder import differences
from utils.train_config import TrainConfig
from utils.train_plan import plan_optimizer
from utils.yolo.inputs import prepare_batch
from utils.yolo.loss import SegmentationLoss, inverse_frequency_weights
from utils.yolo.model import build_model, freeze_layers, load_weights, save_deployable
from utils.yolo.optimizer import parameter_groups

NAMES = ("pole", "transformer", "wire", "box")
COLOURS = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250], [250, 250, 20]])
COLOURLESS = AugmentConfig(hsv_h=0, hsv_s=0, hsv_v=0)
SIZE_PX = 128
WORST_LABEL = 0.1  # edges are smooth: a thin wire, enlarged, has few pixels of its full colour


class Pictures(InMemory):
    """Photographs in memory: a pole, a transformer on it, a wire across everything, a box; smaller lies on top."""

    def __init__(self, count: int) -> None:
        self.photos = [Photo(None, *self.labels(number)) for number in range(count)]  # type: ignore[arg-type]

    def labels(self, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        rng = np.random.default_rng(number)
        pole, wire, (left, top) = rng.uniform(0.1, 0.8), rng.uniform(0.2, 0.4), rng.uniform(0.5, 0.8, 2)
        bars = [
            (pole, 0.2, pole + 0.08, 0.95),
            (pole - 0.02, 0.3, pole + 0.1, 0.45),
            (left, top, left + 0.15, top + 0.15),
        ]
        outlines = [np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]]) for x1, y1, x2, y2 in bars]
        outlines.append(np.array([[0, wire], [1, wire + 0.1], [1, wire + 0.16], [0, wire + 0.06]]))
        return np.array([0, 1, 3, 2]), [outline.astype(np.float32) for outline in outlines]

    def whole(self, number: int) -> np.ndarray:
        image = np.full((120, 160, 3), 60, np.uint8)
        class_ids, polygons = self.photos[number].class_ids, self.photos[number].polygons
        shown = [(polygon * (160, 120)).astype(np.float32) for polygon in polygons]
        for position in sorted(range(len(shown)), key=lambda k: -cv2.contourArea(shown[k])):
            fixed = np.rint((shown[position] - 0.5) * 16).astype(np.int32)
            cv2.fillPoly(image, [fixed], COLOURS[class_ids[position]].tolist(), shift=4)
        return image


PICTURES = Pictures(6)


def dataset_of(config: AugmentConfig | None, size_px: int = SIZE_PX, mosaic_epochs: int = 9) -> SegmentationDataset:
    return SegmentationDataset(
        PICTURES.photos,
        size_px,
        packed=PICTURES,  # type: ignore[arg-type]
        augment=config,
        mosaic_epochs=mosaic_epochs,
    )


def samples_of(config: AugmentConfig, mosaic_epochs: int = 9, epochs: int = 3) -> list[Sample]:
    data = dataset_of(config, mosaic_epochs=mosaic_epochs)
    return [data[epoch, index] for epoch in range(epochs) for index in range(len(data))]


def content(sample: Sample) -> list[bytes]:
    arrays = (sample.image, sample.class_ids, sample.boxes, sample.masks, *sample.polygons)
    return [array.tobytes() for array in arrays]


def worst_label(sample: Sample | Scene) -> float:
    """Return the largest share of an object's visible inside, a pixel off every edge, that shows another colour."""
    order = large_to_small(sample.polygons).tolist()
    owner = np.zeros(sample.image.shape[:2], np.int32)
    for position in order:
        cv2.fillPoly(owner, [np.rint((sample.polygons[position] - 0.5) * 16).astype(np.int32)], position + 1, shift=4)
    worst = 0.0
    for position in order:
        inside = cv2.erode((owner == position + 1).astype(np.uint8), np.ones((5, 5), np.uint8), borderValue=1) > 0
        if inside.sum() > 20:
            distance = np.abs(sample.image[inside].astype(int) - COLOURS[sample.class_ids[position]]).max(-1)
            worst = max(worst, float((distance > 95).mean()))
    return worst


def unlabelled_pixels(sample: Sample) -> int:
    """Count strongly coloured pixels more than two pixels away from every label of any class."""
    labelled = np.zeros(sample.image.shape[:2], np.uint8)
    for polygon in sample.polygons:
        cv2.fillPoly(labelled, [np.rint(polygon - 0.5).astype(np.int32)], 1)
    image = sample.image.astype(int)
    is_coloured = image.max(-1) - image.min(-1) > 100
    return int((is_coloured & (cv2.dilate(labelled, np.ones((5, 5), np.uint8)) == 0)).sum())


# --- augmentation --------------------------------------------------------------------------------------------------

STRONG = {"shear": 15.0, "copy_paste": 1.0, "mixup": 1.0}


@pytest.mark.parametrize("name", STRONG)
def test_an_option_at_zero_changes_no_byte_and_above_it_does(name: str) -> None:
    plain, still, changed = (
        [content(sample) for sample in samples_of(config)]
        for config in (
            AugmentConfig(degrees=10),
            AugmentConfig(degrees=10, **{name: 0.0}),
            AugmentConfig(degrees=10, **{name: STRONG[name]}),
        )
    )
    assert still == plain
    assert sum(now != before for now, before in zip(changed, plain, strict=True)) > len(plain) / 2


@pytest.mark.parametrize("name", ["copy_paste", "mixup"])
def test_a_probability_that_never_strikes_leaves_the_geometry(name: str) -> None:
    for sample, plain in zip(samples_of(AugmentConfig(**{name: 1e-12})), samples_of(AugmentConfig()), strict=True):
        assert [polygon.tobytes() for polygon in sample.polygons] == [polygon.tobytes() for polygon in plain.polygons]


def test_the_measure_of_these_tests_sees_labels_that_are_off() -> None:
    sample = dataset_of(COLOURLESS)[0, 1]
    assert worst_label(sample) < WORST_LABEL
    shifted = dataclasses.replace(sample, polygons=[polygon + 6 for polygon in sample.polygons])
    assert worst_label(shifted) > 0.5
    assert unlabelled_pixels(dataclasses.replace(sample, polygons=sample.polygons[:1])) > 50


def test_shear_moves_labels_with_their_pixels() -> None:
    config = dataclasses.replace(COLOURLESS, shear=20.0)
    samples = samples_of(config, mosaic_epochs=0)
    assert max(map(worst_label, samples)) < WORST_LABEL
    assert max(map(unlabelled_pixels, samples)) < 12
    edges = [np.diff(sample.polygons[k][:2], axis=0)[0] for sample in samples for k in range(len(sample.polygons))]
    assert np.mean([min(abs(edge)) > 1 for edge in edges]) > 0.3  # upright bars no longer are


def test_pasted_objects_bring_their_labels_and_spare_those_on_top() -> None:
    config = dataclasses.replace(COLOURLESS, copy_paste=1.0)
    pasted, plain = samples_of(config), samples_of(COLOURLESS)
    assert max(map(worst_label, pasted)) < WORST_LABEL
    assert (
        max(unlabelled_pixels(now) - unlabelled_pixels(before) for now, before in zip(pasted, plain, strict=True)) < 5
    )
    more = [len(now.class_ids) - len(before.class_ids) for now, before in zip(pasted, plain, strict=True)]
    assert min(more) >= 0
    assert np.mean(more) > 1
    fewer = np.mean([len(sample.class_ids) for sample in samples_of(dataclasses.replace(COLOURLESS, copy_paste=0.3))])
    assert fewer < np.mean([len(sample.class_ids) for sample in pasted])


def square(left: float, top: float, side: float) -> np.ndarray:
    return np.array([[left, top], [left + side, top], [left + side, top + side], [left, top + side]])


def painted(*squares: tuple[int, float, float, float]) -> Scene:
    image = np.full((100, 100, 3), 60, np.uint8)
    for class_id, left, top, side in squares:
        image[int(top) : int(top + side), int(left) : int(left + side)] = COLOURS[class_id]
    return Scene(image, [entry[0] for entry in squares], [square(*entry[1:]) for entry in squares])


def test_an_object_is_pasted_mirrored_where_there_is_room_only() -> None:
    # The first has room on the other side; the second would cover more than 30 % of itself.
    scene = painted((0, 10, 10, 20), (1, 42, 60, 20))
    result = paste_mirrored(scene, 1.0, sample_generator(0, 0, 0))
    assert result.class_ids == [0, 1, 0]
    np.testing.assert_allclose(result.polygons[2].min(0), (70, 10))
    np.testing.assert_allclose(result.polygons[2].max(0), (90, 30))
    assert (result.image[11:29, 71:89] == COLOURS[0]).all()
    assert (result.image[61:79, 43:61] == COLOURS[1]).all()
    assert (scene.image[11:29, 71:89] == 60).all()  # the picture passed in stays
    assert paste_mirrored(scene, 0.0, sample_generator(0, 0, 0)) is scene


def test_an_object_never_comes_without_what_lies_on_it() -> None:
    # The transformer's mirror image would cover the box, so it stays away, and the pole that carries it too.
    pole, transformer, in_the_way = (0, 10, 10, 30), (1, 20, 20, 12), (3, 66, 20, 16)
    alone = paste_mirrored(painted(pole, transformer), 1.0, sample_generator(0, 0, 0))
    assert sorted(alone.class_ids) == [0, 0, 1, 1]
    assert (alone.image[21:31, 69:79] == COLOURS[1]).all()
    blocked = paste_mirrored(painted(pole, transformer, in_the_way), 1.0, sample_generator(0, 0, 0))
    assert 0 not in blocked.class_ids[3:]
    assert 1 not in blocked.class_ids[3:]


def test_mixup_holds_both_pictures_and_the_labels_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Scene, Scene, Scene]] = []

    def recorded(first: Scene, second: Scene, rng: np.random.Generator) -> Scene:
        seen.append((first, second, blend(first, second, rng)))
        return seen[-1][2]

    monkeypatch.setattr(dataset_module, "blend", recorded)
    samples = samples_of(dataclasses.replace(COLOURLESS, mixup=1.0), epochs=2)
    assert len(seen) == len(samples)
    for sample, (first, second, _) in zip(samples, seen, strict=True):
        assert max(worst_label(first), worst_label(second)) < WORST_LABEL
        assert sorted(sample.class_ids.tolist()) == sorted(first.class_ids + second.class_ids)
        a, b, mixed = (image.astype(float) for image in (first.image, second.image, sample.image))
        differs = np.abs(a - b) > 60
        shares = (mixed - b)[differs] / (a - b)[differs]
        assert 0.2 < np.median(shares) < 0.8
        assert np.ptp(shares) < 0.04
        assert set(np.unique(sample.masks)) <= set(range(len(sample.class_ids) + 1))
        areas = [round(area(polygon), 6) for polygon in sample.polygons]
        assert areas == sorted(areas, reverse=True)


def test_mixup_and_copy_paste_end_with_mosaic() -> None:
    strong = dataclasses.replace(AugmentConfig(), mixup=1.0, copy_paste=1.0)
    late, plain = (samples_of(config, mosaic_epochs=0) for config in (strong, AugmentConfig()))
    assert list(map(content, late)) == list(map(content, plain))


def test_workers_and_neighbours_change_nothing_with_everything_on() -> None:
    config = AugmentConfig(degrees=10, shear=5, mixup=0.5, copy_paste=0.5)
    seen = []
    for workers in (0, 1):
        batches = EpochBatches(6, 2, 0, 1, seed=3, sizes_px=multi_scale_sizes(SIZE_PX))
        loader = get_dataloader(dataset_of(config), batches, workers, False)
        loader.set_epoch(1, 1)
        seen.append([content(sample) for batch in loader for sample in batch.samples])
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]


# --- several sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_px", "low", "high"), [(640, 320, 960), (96, 64, 128), (64, 64, 96), (672, 352, 992), (1280, 640, 1920)]
)
def test_sizes_are_multiples_of_32_within_half_of_the_size(size_px: int, low: int, high: int) -> None:
    sizes = multi_scale_sizes(size_px)
    assert (sizes[0], sizes[-1]) == (low, high)
    assert all(size % 32 == 0 and (size >= size_px / 2) and size <= size_px * 1.5 for size in sizes)
    assert size_px in sizes


def keys_of(rank: int, world_size: int, epoch: int, start_batch: int = 0, seed: int = 5) -> list[list[tuple[int, ...]]]:
    batches = EpochBatches(48, 4 // world_size, rank, world_size, seed, multi_scale_sizes(640))
    batches.epoch, batches.start_batch = epoch, start_batch
    return list(batches)


def test_all_ranks_take_the_same_size_at_any_world_size_and_after_a_resume() -> None:
    alone = keys_of(0, 1, epoch=2)
    sizes = [{key[2] for key in batch} for batch in alone]
    assert {len(size) for size in sizes} == {1}
    assert len(set.union(*sizes)) > 5
    for rank in range(2):
        assert [{key[2] for key in batch} for batch in keys_of(rank, 2, epoch=2)] == sizes
    assert keys_of(0, 1, epoch=2, start_batch=7) == alone[7:]
    others = (keys_of(0, 1, epoch=3), keys_of(0, 1, epoch=2, seed=6))
    assert all([{key[2] for key in batch} for batch in other] != sizes for other in others)


def test_without_several_sizes_keys_are_what_they_were() -> None:
    batches = EpochBatches(48, 4, 0, 1, 5)
    batches.epoch = 2
    assert list(batches) == [[key[:2] for key in batch] for batch in keys_of(0, 1, epoch=2)]


@pytest.mark.parametrize("size_px", [64, 96, 192])
def test_a_sample_of_another_size_has_all_its_labels_at_that_size(size_px: int) -> None:
    data = dataset_of(COLOURLESS)
    for index in range(6):
        sample, usual = data[0, index, size_px], data[0, index]
        assert sample.image.shape == (size_px, size_px, 3)
        assert sample.masks.shape == (size_px // MASK_STRIDE,) * 2
        assert worst_label(sample) < WORST_LABEL
        # The same view at another size: as many objects, each where it was, but for those too small to keep.
        scale = size_px / SIZE_PX
        assert abs(len(sample.class_ids) - len(usual.class_ids)) <= 1
        if sample.class_ids.tolist() == usual.class_ids.tolist():
            # Objects as large as one another may change places.
            ours, theirs = (
                np.array(sorted(map(tuple, np.rint(boxes)))) for boxes in (sample.boxes, usual.boxes * scale)
            )
            np.testing.assert_allclose(ours, theirs, atol=1)
    assert content(data[0, 1, SIZE_PX]) == content(data[0, 1])


def test_smaller_sizes_average_the_photographs_first() -> None:
    # A comb of lines, one pixel in eight: skipping pixels would make it darker here and lighter there.
    class Comb(InMemory):
        def whole(self, _: int) -> np.ndarray:
            image = np.zeros((256, 256, 3), np.uint8)
            image[:, ::8] = 240
            return image

    still = AugmentConfig(**{field.name: 0 for field in dataclasses.fields(AugmentConfig)})
    data = SegmentationDataset(
        [Photo(None, np.zeros(0, np.int64), [])],  # type: ignore[arg-type]
        256,
        packed=Comb(),  # type: ignore[arg-type]
        augment=still,
    )
    assert data[0, 0, 32].image.mean() == pytest.approx(30, abs=1)
    assert data[0, 0, 32].image.std() < 2


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model("yolov8n-seg.yaml", NAMES)


@pytest.mark.parametrize("size_px", [64, 192])
def test_one_model_learns_from_batches_of_any_size(model: Any, size_px: int) -> None:
    data = dataset_of(AugmentConfig())
    images, targets = prepare_batch(collate([data[0, 0, size_px], data[0, 1, size_px]]), torch.device("cpu"))
    assert targets.masks.shape[1:] == (size_px // 4, size_px // 4)
    model.train().zero_grad()
    outputs = model(images)
    assert outputs["proto"].shape[-2:] == targets.masks.shape[1:]
    loss, values = SegmentationLoss(model)(outputs, targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert values["seg"] > 0
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


# --- frozen layers -------------------------------------------------------------------------------------------------


def trained(folder: Path, num_frozen: int, use_ema: bool) -> tuple[Any, dict[str, torch.Tensor], TrainingEngine]:
    """Take three engine steps; return the model, its state before, and the engine."""
    torch.manual_seed(0)
    model = build_model("yolov8n-seg.yaml", NAMES)
    freeze_layers(model, num_frozen)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class WithoutEvaluation(Task):
        def prepare(self, batch: Batch, device: torch.device) -> Any:
            return prepare_batch(batch, device)

        def evaluate(self, model: torch.nn.Module, loader: Any, epoch: Epoch) -> dict[str, float]:
            return {"val_loss": 0.0}

        def save(self, path: Path, model: torch.nn.Module, info: dict[str, Any]) -> None:
            save_deployable(path, model, info, img_size=64, data="data.yaml")

    options = EngineOptions(ema_decay=0.9999 if use_ema else None, tensorboard=False)
    engine = TrainingEngine(model, torch.device("cpu"), options, task=WithoutEvaluation(), run=folder)
    batches: list[Batch] = [synthetic_batch(2, 64, len(NAMES), seed=seed, objects_per_image=4) for seed in range(3)]
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-4), lr=0.01, momentum=0.9)
    engine.train(batches, None, optimizer, SegmentationLoss(model), num_epochs=1)
    return model, before, engine


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def assert_moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], names: list[str]) -> None:
    """All statistics and nearly all weights changed; a few of BatchNorm's are 1 and lose their small steps to rounding."""
    still = [name for name in names if torch.equal(after[name], before[name])]
    assert "model.22.dfl.conv.weight" in still
    assert not [name for name in still if "running" in name or "num_batches" in name]
    assert len(still) < 0.1 * len(names)


@pytest.mark.parametrize("use_ema", [True, False])
def test_frozen_layers_keep_weights_and_statistics_while_the_others_move(tmp_path: Path, use_ema: bool) -> None:
    model, before, engine = trained(tmp_path, 10, use_ema)
    assert engine.progress.global_step == 3
    after = model.state_dict()
    frozen = [name for name in before if layer_of(name) < 10]
    assert any("running_var" in name for name in frozen)
    for state in (after, engine.evaluation_model.state_dict()):
        assert all(torch.equal(state[name], before[name]) for name in frozen)
    assert_moved(before, after, [name for name in before if layer_of(name) >= 10])
    # The file for others holds neither the hook nor anything else of ours.
    assert not load_weights(str(tmp_path / "last.pt"))._forward_pre_hooks
    grouped = {id(p) for group in parameter_groups(model, 0.0) for p in group["params"]}
    assert not any(id(parameter) in grouped for name, parameter in model.named_parameters() if layer_of(name) < 10)


def test_without_freezing_everything_moves(tmp_path: Path) -> None:
    model, before, _ = trained(tmp_path, 0, False)
    assert not model._forward_pre_hooks
    assert_moved(before, model.state_dict(), list(before))


def test_freezing_survives_the_conversion_to_synchronised_batchnorm() -> None:
    built = build_model("yolov8n-seg.yaml", NAMES)
    freeze_layers(built, 3)
    model: Any = convert_sync_batchnorm(built, torch.device("cpu")).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.rand(2, 3, 64, 64))
    changed = {layer_of(name) for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert min(changed) == 3
    assert not any(layer.training for layer in model.model[:3])
    assert model.model[3].training


def test_the_head_cannot_be_frozen(model: Any) -> None:
    with pytest.raises(UsageError, match=r"--freeze 23: the model has 22 layers before its head"):
        freeze_layers(model, 23)


# --- class weights -------------------------------------------------------------------------------------------------


def test_class_weights_are_inverse_frequencies_with_mean_one() -> None:
    weights = inverse_frequency_weights(np.array([1, 2, 4, 0]))
    assert weights is not None
    raw = np.array([1, 0.5, 0.25, (1 + 0.5 + 0.25) / 3])  # a class without objects gets the mean of the others
    np.testing.assert_allclose(weights.numpy(), raw / raw.mean(), rtol=1e-6)
    assert weights.mean().item() == pytest.approx(1)
    assert inverse_frequency_weights(np.zeros(3, np.int64)) is None


def test_objects_are_counted_over_all_photographs() -> None:
    assert count_classes(PICTURES.photos, 6).tolist() == [6, 6, 6, 6, 0, 0]
    assert count_classes([], 2).tolist() == [0, 0]


def test_weights_multiply_each_classs_share_and_none_is_the_plain_loss(model: Any) -> None:
    images, targets = prepare_batch(synthetic_batch(2, 64, len(NAMES), objects_per_image=4), torch.device("cpu"))
    model.train()
    with torch.no_grad():
        outputs = model(images)

    def parts(weights: torch.Tensor | None) -> torch.Tensor:
        return SegmentationLoss(model, class_weights=weights).sums(outputs, targets).parts

    plain = parts(None)
    assert torch.equal(plain, SegmentationLoss(model).sums(outputs, targets).parts)
    one_class = torch.stack([parts(row) for row in torch.eye(len(NAMES))])
    assert torch.equal(one_class[:, [0, 1, 3]], plain[[0, 1, 3]].expand(len(NAMES), 3))  # only the class part
    torch.testing.assert_close(one_class[:, 2].sum(), plain[2])
    weights = torch.tensor([3.0, 0.5, 0.25, 0.25])
    torch.testing.assert_close(parts(weights)[2], (weights * one_class[:, 2]).sum())


# --- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--freeze", "-1"], "--freeze -1: must be at least 0"),
        (["--mixup", "1.5"], "--mixup 1.5: must be at least 0 and at most 1"),
        (["--copy-paste", "-0.1"], "--copy-paste -0.1: must be at least 0 and at most 1"),
        (["--shear", "45"], "--shear 45.0: must be at least 0 and below 45"),
        (["--class-weights", "some"], "invalid choice: 'some'"),
        (["--perspective", "0.1"], "unknown argument --perspective"),
    ],
)
def test_wrong_values_are_refused_in_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(TrainConfig, "", flags)
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_the_options_reach_the_augmentation() -> None:
    config = parse_config(TrainConfig, "", ["--shear=3", "--mixup=0.2", "--copy-paste=0.4", "--multi-scale"])
    assert (config.augment.shear, config.augment.mixup, config.augment.copy_paste) == (3, 0.2, 0.4)
    assert config.multi_scale
    assert TrainConfig().augment == AugmentConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("freeze", 10),
        ("multi_scale", True),
        ("class_weights", "auto"),
        ("shear", 2.0),
        ("mixup", 0.1),
        ("copy_paste", 0.1),
    ],
)
def test_another_recipe_is_another_run_also_beside_a_run_from_before_the_option(name: str, value: Any) -> None:
    earlier = to_dict(TrainConfig())
    changed = TrainConfig(**{name: value})
    assert differences(changed, earlier) == [f"{name} {earlier[name]} -> {value}"]
    assert differences(changed, to_dict(changed)) == []
    before = {key: kept for key, kept in earlier.items() if key != name}
    assert differences(TrainConfig(), before) == []
    assert len(differences(changed, before)) == 1


@pytest.mark.parametrize(
    ("flags", "expected"), [({"optimizer": "sgd"}, 0.1), ({"optimizer": "adamw"}, 0.0), ({"lr": 0.01}, 0.1)]
)
def test_only_sgd_warms_its_biases_up_from_a_high_rate(flags: dict[str, Any], expected: float) -> None:
    assert plan_optimizer(TrainConfig(**flags), 1, 1000, 8).warmup_bias_lr == expected
