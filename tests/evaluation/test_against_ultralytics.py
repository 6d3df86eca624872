"""Ultralytics' own validation of a trained file measures what this project measures."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

from yolo_seg_ddp.data.dataset import SegmentationDataset, collate, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.loader import ShardBatches, get_dataloader
from yolo_seg_ddp.evaluation.evaluate import AP_LIMITS, criterion_of, evaluate
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import SegmentationLoss
from yolo_seg_ddp.yolo.model import build_model, load_weights, save_deployable

NAMES = ("disc", "bar", "box")
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))
SIZE_PX, NUM_PHOTOS, STEPS = 160, 6, 45
CPU = torch.device("cpu")


def draw_set(folder: Path) -> Path:
    """Draw photographs that have the network's size already, so that neither side resizes; return
    the YAML file.
    """
    rng, size = np.random.default_rng(5), np.array([SIZE_PX, 128])
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    shapes = [
        np.stack([np.cos(turns), np.sin(turns)], axis=1),
        *[np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])] * 2,
    ]
    for kind in ("images", "labels"):
        (folder / kind / "train").mkdir(parents=True)
    for index in range(NUM_PHOTOS):
        photo = rng.integers(90, 120, (*size[::-1], 3), dtype=np.uint8)
        lines = []
        for class_id in rng.integers(0, len(NAMES), 6).tolist():
            half = rng.uniform(8, 32, 2) * ((1, 1), (1, 0.3), (1, 1))[class_id]
            outline = (rng.uniform(0.15, 0.85, 2) * size + shapes[class_id] * half).clip(0, size)
            cv2.fillPoly(photo, [np.rint(outline).astype(np.int32)], COLOURS[class_id])
            lines.append(
                " ".join(map(str, [class_id, *(outline / size).reshape(-1).round(6).tolist()]))
            )
        cv2.imwrite(str(folder / "images" / "train" / f"{index}.png"), photo)
        (folder / "labels" / "train" / f"{index}.txt").write_text("\n".join(lines) + "\n")
    content = {
        "path": str(folder),
        "train": "images/train",
        "val": "images/train",
        "names": dict(enumerate(NAMES)),
    }
    (folder / "dataset.yaml").write_text(yaml.safe_dump(content))
    return folder / "dataset.yaml"


def learn(dataset: SegmentationDataset, path: Path) -> None:
    """Train on all photographs at once until much of them is known by
    heart, and save the network.
    """
    torch.manual_seed(0)
    model = build_model("yolov8n-seg.yaml", NAMES).train()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 0.2  # the run is short
    images, targets = prepare_batch(
        collate([dataset[(0, index)] for index in range(len(dataset))]), CPU
    )
    criterion, optimizer = (
        SegmentationLoss(model, loss_scale=1.0),
        torch.optim.AdamW(model.parameters(), 0.003),
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        criterion(model(images), targets)[0].backward()
        optimizer.step()
    save_deployable(path, model, {}, img_size=SIZE_PX, data="dataset.yaml")


def test_ultralytics_measures_what_we_measure(tmp_path: Path) -> None:
    """Where two objects with equally many pixels overlap, the label file's order or an unstable
    sort decides there which of them is in front. A detection of a class may therefore count in one
    and not in the other.
    """
    from ultralytics import YOLO

    data, weights = draw_set(tmp_path / "set"), tmp_path / "best.pt"
    dataset = SegmentationDataset(
        read_photos(load_dataset_yaml(str(data)), "train", print), SIZE_PX
    )
    learn(dataset, weights)
    model, loader = (
        load_weights(str(weights)),
        get_dataloader(dataset, ShardBatches(NUM_PHOTOS, 4, 0, 1), 0, False),
    )
    limits = {**AP_LIMITS, "mask_score": False}  # Ultralytics' scores do not know the mask
    ours = evaluate(model, loader, NAMES, criterion_of(model), CPU, limits=limits).metrics
    assert 0.1 < ours["mask_map50_95"] < 0.9, (
        "the model must have learnt something, or the comparison proves nothing"
    )
    quiet = {
        "plots": False,
        "verbose": False,
        "workers": 0,
        "device": "cpu",
        "project": str(tmp_path / "theirs"),
    }
    theirs: Any = YOLO(weights).val(
        data=str(data), split="train", imgsz=SIZE_PX, batch=4, rect=False, **quiet
    )
    for kind, judged, within in (("box", theirs.box, 0.002), ("mask", theirs.seg, 0.02)):
        assert ours[f"{kind}_map50"] == pytest.approx(judged.map50, abs=0.005)
        assert ours[f"{kind}_map50_95"] == pytest.approx(judged.map, abs=0.005)
        rows = [ours["per_class"][class_id] for class_id in judged.ap_class_index]
        assert [row["class_id"] for row in rows] == [0, 1, 2]
        assert [row[f"{kind}_map50"] for row in rows] == pytest.approx(
            judged.ap50.tolist(), abs=within
        )
        assert [row[f"{kind}_map50_95"] for row in rows] == pytest.approx(
            judged.ap.tolist(), abs=within
        )
