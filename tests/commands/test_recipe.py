"""Frozen layers, class weights, and the options of the recipe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.pictures import NAMES, PICTURES
from yolo_seg_ddp.data.augment import Augmentation, AugmentOptions
from yolo_seg_ddp.data.augmentation_policy import resolve_augmentation
from yolo_seg_ddp.data.dataset import Batch, count_classes
from yolo_seg_ddp.data.label_shapes import LabelStatistics
from yolo_seg_ddp.engine import EngineOptions, Epoch, Task, TrainingEngine
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.run.folder import differences
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.distributed.sync_bn import convert_sync_batchnorm
from yolo_seg_ddp.utils.options import section_of, to_dict
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import SegmentationLoss, balancing_weights
from yolo_seg_ddp.yolo.model import build_model, freeze_layers, load_weights, save_deployable
from yolo_seg_ddp.yolo.optimizer import parameter_groups


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model("yolov8n-seg.yaml", NAMES)


class WithoutEvaluation(Task):
    def prepare(self, batch: Batch, device: torch.device) -> Any:
        return prepare_batch(batch, device)

    def evaluate(self, model: torch.nn.Module, loader: Any, epoch: Epoch) -> dict[str, float]:
        return {"val_loss": 0.0}

    def save(self, path: Path, model: torch.nn.Module, info: dict[str, Any]) -> None:
        save_deployable(path, model, info, img_size=64, data="data.yaml")


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def test_frozen_layers_keep_weights_and_statistics_while_the_others_move(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = build_model("yolov8n-seg.yaml", NAMES)
    freeze_layers(model, 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = EngineOptions(epochs=1, ema_decay=0.9999, tensorboard=False)
    engine = TrainingEngine(
        model, torch.device("cpu"), options, task=WithoutEvaluation(), run=tmp_path
    )
    batches: list[Batch] = [
        synthetic_batch(2, 64, len(NAMES), seed=seed, objects_per_image=4) for seed in range(3)
    ]
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-4), lr=0.01, momentum=0.9)
    engine.train(batches, None, optimizer, SegmentationLoss(model))
    assert engine.progress.global_step == 3
    after = model.state_dict()
    frozen = [name for name in before if layer_of(name) < 10]
    assert any("running_var" in name for name in frozen)
    for state in (after, engine.evaluation_model.state_dict()):
        assert all(torch.equal(state[name], before[name]) for name in frozen)
    # All other statistics and nearly all weights moved; a few of BatchNorm's are 1 and lose their
    # small steps to rounding.
    others = [name for name in before if layer_of(name) >= 10]
    still = [name for name in others if torch.equal(after[name], before[name])]
    assert "model.22.dfl.conv.weight" in still
    assert not [name for name in still if "running" in name or "num_batches" in name]
    assert len(still) < 0.1 * len(others)
    # The file for others holds neither the hook nor anything else of ours.
    assert not load_weights(str(tmp_path / "last.pt"))._forward_pre_hooks
    grouped = {id(p) for group in parameter_groups(model, 0.0) for p in group["params"]}
    assert not any(
        id(parameter) in grouped
        for name, parameter in model.named_parameters()
        if layer_of(name) < 10
    )


def test_freezing_survives_the_conversion_to_synchronised_batchnorm() -> None:
    built = build_model("yolov8n-seg.yaml", NAMES)
    freeze_layers(built, 3)
    model: Any = convert_sync_batchnorm(built).train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.rand(2, 3, 64, 64))
    changed = {
        layer_of(name)
        for name, value in model.named_buffers()
        if not torch.equal(value, before[name])
    }
    assert min(changed) == 3
    assert not any(layer.training for layer in model.model[:3])
    assert model.model[3].training


def test_class_weights_balance_classes_and_have_the_mean_one_over_all_objects() -> None:
    weights = balancing_weights(np.array([1, 4, 16, 0]))
    assert weights is not None
    raw = np.array([1, 0.5, 0.25])
    np.testing.assert_allclose(weights[:3].numpy(), raw * 21 / (1 + 2 + 4), rtol=1e-6)
    assert weights[3] == 1, "a class without objects"
    for equal in ([0, 0, 0], [0, 7, 0], [5, 5, 5]):
        assert balancing_weights(np.array(equal)) is None


def test_objects_are_counted_over_all_photographs() -> None:
    assert count_classes(PICTURES.photos, 6).tolist() == [6, 6, 6, 6, 0, 0]
    assert count_classes([], 2).tolist() == [0, 0]


def test_weights_multiply_all_errors_of_a_class_and_its_objects(model: Any) -> None:
    images, targets = prepare_batch(
        synthetic_batch(2, 64, len(NAMES), objects_per_image=4), torch.device("cpu")
    )
    # Half of the objects have boxes alone, and some neighbours are of like colour.
    boxed = torch.arange(len(targets.class_ids)) % 8 < 4
    targets = replace(targets, boxed=boxed, colours=torch.randn(2, 3, *targets.masks.shape[1:]))
    model.train()
    outputs = model(images)
    leaves = [outputs[name] for name in ("boxes", "scores", "mask_coefficient", "proto")]

    def learned(weights: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the parts, and their gradient by each output."""
        parts = SegmentationLoss(model, class_weights=weights).sums(outputs, targets).parts
        return [parts.detach(), *torch.autograd.grad(parts.sum(), leaves, retain_graph=True)]

    of_classes = [learned(row) for row in torch.eye(len(NAMES))]
    weights = torch.tensor([3.0, 0.5, 0.25, 0.25])
    for values, weighted, plain in zip(
        zip(*of_classes, strict=True), learned(weights), learned(None), strict=True
    ):
        torch.testing.assert_close(torch.stack(values).sum(0), plain)
        torch.testing.assert_close(
            torch.einsum("c,c...->...", weights, torch.stack(values)), weighted
        )
        assert not torch.equal(weighted, plain)


def test_the_options_reach_the_augmentation() -> None:
    labels = LabelStatistics((), {}, None, are_all_thin=False)

    def augment(config: TrainConfig) -> Augmentation:
        return resolve_augmentation(
            None, "auto", section_of(config, AugmentOptions), labels, NAMES
        ).augment

    config = parse_config(
        TrainConfig, "", ["--shear=3", "--mixup=0.2", "--copy-paste=0.4", "--multi-scale"]
    )
    assert (augment(config).shear, augment(config).mixup, augment(config).copy_paste) == (
        3,
        0.2,
        0.4,
    )
    assert config.multi_scale
    assert augment(TrainConfig()) == Augmentation(degrees=0.0, flipud=0.0, draw_wires=0.0)


RECIPE = {
    "freeze": 10,
    "multi_scale": True,
    "class_weights": "none",
    "shear": 2.0,
    "mixup": 0.1,
    "copy_paste": 0.1,
}


@pytest.mark.parametrize(("name", "value"), RECIPE.items())
def test_another_recipe_is_another_run_also_beside_a_run_from_before_the_option(
    name: str, value: Any
) -> None:
    earlier = to_dict(TrainConfig())
    changed = TrainConfig(**{name: value})
    assert differences(changed, earlier) == [f"{name} {earlier[name]} -> {value}"]
    assert differences(changed, to_dict(changed)) == []
    before = {key: kept for key, kept in earlier.items() if key != name}
    assert differences(TrainConfig(), before) == []
    assert len(differences(changed, before)) == 1
