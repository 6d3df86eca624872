"""The trainer's options, and what follows from them and from the labels: rates, batch size,
workers, cache, augmentation.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from train_yolo_ddp import conclude
from yolo_seg_ddp.data.augment import Augmentation, AugmentOptions
from yolo_seg_ddp.data.augmentation_policy import AugmentationPolicy, resolve_augmentation
from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.data.dataset_yaml import DatasetSpec
from yolo_seg_ddp.data.drawn_wires import band
from yolo_seg_ddp.data.label_shapes import LabelStatistics, measure_labels
from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.data.options import DataOptions
from yolo_seg_ddp.data.windows import WindowConfig
from yolo_seg_ddp.engine import EngineOptions
from yolo_seg_ddp.engine.recovery import Diverged
from yolo_seg_ddp.run import folder
from yolo_seg_ddp.run.folder import differences, resume_arguments, without_local_rank
from yolo_seg_ddp.training import batch_size
from yolo_seg_ddp.training import data as training_data
from yolo_seg_ddp.training.batch_size import largest_that_fits
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.plan import plan_class_weights, plan_optimizer, plan_workers
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.devices import Precision, choose_precision
from yolo_seg_ddp.utils.errors import EXIT_DIVERGED, UsageError, UserError
from yolo_seg_ddp.utils.options import section_of


def config_of(*arguments: str) -> TrainConfig:
    return parse_config(TrainConfig, "", list(arguments))


def policy(config: TrainConfig, labels: LabelStatistics) -> AugmentationPolicy:
    return resolve_augmentation(
        config.window_config, config.reach, section_of(config, AugmentOptions), labels, NAMES
    )


def test_words_and_numbers_that_yaml_misreads_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("amp: off\nsync_bn: on\nlr: 1e-3\nbatch_size: auto\n")
    config = config_of("--config", str(file))
    assert (config.amp, config.sync_bn, config.lr, config.batch_size) == ("off", "on", 0.001, 0)
    assert config_of("--batch-size", "auto").batch_size == 0


def test_a_run_is_the_same_whatever_only_changes_how_it_is_run() -> None:
    earlier: dict[str, Any] = {"lr": 0.01, "epochs": 10, "num_workers": 2, "img_size": 640}
    assert differences(config_of("--lr", "0.01", "--epochs", "20"), earlier) == []
    assert differences(config_of("--lr", "0.02"), earlier) == ["lr 0.01 -> 0.02"]
    earlier = {"window_scale": [0.25, 1.0], "windows": 4}
    assert differences(config_of("--windows", "4", "--window-scale", "0.25", "1"), earlier) == []
    assert differences(config_of("--windows", "4"), earlier) == [
        "window_scale (0.25, 1.0) -> (0.5, 1.0)"
    ]
    assert differences(config_of(), {}) == []


def test_mosaic_ends_before_the_run_does() -> None:
    assert config_of().mosaic_epochs(100) == 90
    assert config_of().mosaic_epochs(16) == 6
    assert config_of().mosaic_epochs(8) == 1


def test_windows_need_a_low_and_a_high_scale() -> None:
    config = config_of("--windows", "4", "--window-scale", "0.25", "1")
    assert config.window_config == WindowConfig(4, 0.25, 1.0)
    for scales in (("1", "0.5"), ("0.5",), ("0.5", "1.5"), ("0", "1")):
        with pytest.raises(SystemExit):
            config_of("--windows", "4", "--window-scale", *scales)


def test_objects_are_assigned_within_reach_when_training_on_windows() -> None:
    labels = LabelStatistics((), {}, None, are_all_thin=False)
    assert not policy(TrainConfig(), labels).within_reach
    assert policy(TrainConfig(reach="on"), labels).within_reach
    assert policy(TrainConfig(windows=8), labels).within_reach
    assert not policy(TrainConfig(windows=8, reach="off"), labels).within_reach


def test_another_folder_beside_a_resume_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "run_folder_of", Path)
    assert (
        " ".join(resume_arguments(["--resume", "a", "--epochs", "9"])[2:])
        == "--resume a --epochs 9 --save-dir a"
    )
    for flags in (["--save-dir", "b"], ["--save-dir=b"], ["--name", "b"], ["--project=b"]):
        with pytest.raises(
            UsageError, match=f"{flags[0].partition('=')[0]} has no effect with --resume"
        ):
            resume_arguments(["--resume", "a", *flags])


def test_the_optimizer_brings_its_own_rate_unless_one_is_given() -> None:
    chosen = plan_optimizer(config_of(), 1, 1000)
    assert (chosen.name, chosen.lr) == ("musgd", 0.01)
    adamw = plan_optimizer(config_of("--optimizer", "adamw"), 1, 1000)
    assert adamw.name == "adamw"
    assert adamw.lr == 0.002
    assert plan_optimizer(config_of("--optimizer", "adamw", "--lr", "0.02"), 1, 1000).lr == 0.02


@pytest.mark.parametrize(
    ("epochs", "is_trained", "name", "line"),
    [
        (
            15,
            True,
            "adamw",
            "Optimizer: AdamW, because the weights are trained and there are 945 steps",
        ),
        (
            16,
            True,
            "musgd",
            "Optimizer: MuSGD, because the weights are trained and there are 1008 steps",
        ),
        (
            1,
            False,
            "musgd",
            "Optimizer: MuSGD, because the weights are random and there are 63 steps",
        ),
    ],
)
def test_short_trainings_of_trained_weights_take_adamw(
    epochs: int, is_trained: bool, name: str, line: str
) -> None:
    chosen = plan_optimizer(config_of("--epochs", str(epochs)), 1, 1000, is_trained=is_trained)
    assert chosen.name == name
    assert chosen.arithmetic[1].startswith(line)
    on_windows = plan_optimizer(
        config_of("--epochs", str(epochs), "--windows", "8"), 1, 1000, is_trained=is_trained
    )
    assert on_windows.name == "musgd"
    given = plan_optimizer(config_of("--optimizer", "sgd"), 1, 1000, is_trained=is_trained)
    assert not any("because" in line for line in given.arithmetic)


@pytest.mark.parametrize(
    ("wanted", "optimizer", "is_weighted"),
    [("auto", "adamw", 1), ("auto", "musgd", 0), ("root", "musgd", 1), ("none", "adamw", 0)],
)
def test_rare_classes_count_more_with_adamw(wanted: str, optimizer: str, is_weighted: int) -> None:
    weights = plan_class_weights(wanted, optimizer, np.array([200, 10]))
    assert (weights is not None) == is_weighted


def test_rate_and_decay_follow_the_effective_batch() -> None:
    chosen = plan_optimizer(
        config_of("--lr", "0.01", "--accumulate", "2", "--lr-scale", "linear"), 4, 1000
    )
    assert chosen.global_batch_size == 16 * 4 * 2
    assert chosen.lr == pytest.approx(0.01 * 128 / 64)
    assert chosen.weight_decay == pytest.approx(5e-4 * 128 / 64)
    assert "16 images x 4 processes x 2 batches per step = 128" in chosen.arithmetic[0]
    assert "Learning rate: 0.01 x 2 (linear scaling) = 0.02 (MuSGD)" in chosen.arithmetic
    assert (
        "Learning rate: 0.01 (MuSGD)"
        in plan_optimizer(config_of("--lr", "0.01"), 4, 1000).arithmetic
    )


def test_the_trainer_plans_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yolo_seg_ddp.data.loader.shared_memory_free_bytes", lambda: 120_000_000)
    assert plan_workers(4, DataOptions(img_size=640, prefetch=2, multi_scale=False), 8, 1)[0] == 5
    larger = DataOptions(img_size=640, prefetch=2, multi_scale=True)
    assert plan_workers(4, larger, 8, 1)[0] == 2  # sides up to 1.5 times


def test_a_cache_that_was_asked_for_is_not_left_out_silently(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_data, "open_images", lambda *_, **__: "no room for it")
    spec, said = DatasetSpec(tmp_path / "data.yaml", tmp_path, ("pole",), {}), list[str]()
    where: Any = (None, spec, "train", [], 0, said.append)
    assert training_data.open_split(DataOptions(), *where).packed is None
    assert said == ["packed cache off: no room for it"]
    with pytest.raises(
        UserError, match=r"--cache packed: no room for it; make room, or use --cache auto"
    ):
        training_data.open_split(DataOptions(cache="packed"), *where)


NAMES, CPU = ("pole", "wire"), torch.device("cpu")
EVERYWHERE, LEVEL = np.linspace(0, np.pi, 24, endpoint=False), np.zeros(24)
FROM_ABOVE = (90.0, 0.5, 0.5)


@pytest.fixture
def photo_file(tmp_path: Path) -> Path:
    file = tmp_path / "a.jpg"
    Image.new("RGB", (400, 200)).save(file)
    return file


def strips(file: Path, directions: np.ndarray, width_px: float = 1.0, class_id: int = 1) -> Photo:
    """Label strips of 100 pixels, each with one of the directions in pixels of the photograph."""
    centre = np.array([200, 100])
    lines = [centre + np.outer([-50, 50], (np.cos(angle), np.sin(angle))) for angle in directions]
    outlines = [band(line, width_px) / (400, 200) for line in lines]
    return Photo(file, np.full(len(outlines), class_id, np.int64), outlines)


def roots(file: Path, number: int = 24) -> Photo:
    """Label curled lines, each as long and as thin as a wire."""
    along, rng = np.linspace(-60, 60, 40), np.random.default_rng(0)
    lines = [
        np.stack([along, rng.uniform(5, 9) * np.sin(along / rng.uniform(6, 9))], 1)
        for _ in range(number)
    ]
    outlines = [
        band(line + np.array([200, 40 + 5 * number]), 1.0) / (400, 200)
        for number, line in enumerate(lines)
    ]
    return Photo(file, np.ones(number, np.int64), outlines)


def arcs(file: Path, sag: float, number: int = 24) -> Photo:
    """Label arcs of circles of 120 pixels, in all directions; sag: in lengths."""
    radius = 120 * (sag / 2 + 1 / (8 * sag))
    half = np.arcsin(60 / radius)
    angles = np.linspace(-half, half, 40)
    arc = radius * np.stack([np.sin(angles), np.cos(angles) - 1], axis=1)
    turns = np.linspace(0, np.pi, number, endpoint=False)
    lines = [arc @ np.array([[np.cos(t), np.sin(t)], [-np.sin(t), np.cos(t)]]) + 100 for t in turns]
    return Photo(file, np.ones(number, np.int64), [band(line, 1.0) / (400, 200) for line in lines])


def choose(
    photos: list[Photo], **options: float
) -> tuple[tuple[float | None, ...], list[str], Augmentation]:
    chosen = policy(TrainConfig(**options), measure_labels(photos))  # type: ignore[arg-type]
    augment = chosen.augment
    return (augment.degrees, augment.flipud, augment.draw_wires), list(chosen.lines), augment


@pytest.mark.parametrize(
    ("directions", "width_px", "options", "chosen", "line"),
    [
        (
            EVERYWHERE,
            1.0,
            {"windows": 8},
            FROM_ABOVE,
            "training with --degrees 90 --flipud 0.5 --draw-wires 0.5",
        ),
        (
            EVERYWHERE,
            10.0,
            {"windows": 8},
            (90.0, 0.5, 0.0),
            "training with --degrees 90 --flipud 0.5",
        ),
        (EVERYWHERE, 1.0, {}, (0.0, 0.0, 0.0), None),  # cars on a road, which have an up
        (
            EVERYWHERE,
            1.0,
            {"windows": 8, "degrees": 0, "draw_wires": 0},
            (0.0, 0.5, 0.0),
            "training with --flipud 0.5",
        ),
        # too few objects to say anything
        (EVERYWHERE[:10], 1.0, {"windows": 8}, (0.0, 0.0, 0.0), None),
        (LEVEL, 1.0, {"windows": 8}, (0.0, 0.0, 0.0), None),
        (LEVEL + np.pi / 2, 1.0, {"windows": 8, "degrees": 5}, (5.0, 0.0, 0.0), None),
    ],
)
def test_unset_options_follow_from_the_directions_of_the_labelled_objects(
    photo_file: Path,
    directions: np.ndarray,
    width_px: float,
    options: dict[str, float],
    chosen: tuple[float, float, float],
    line: str | None,
) -> None:
    now, said, _ = choose([strips(photo_file, directions, width_px)], **options)
    assert now == chosen
    assert [text.split(": ")[1] for text in said if text.startswith("Labelled objects lie")] == (
        [line] if line else []
    )


def test_poles_of_a_class_of_their_own_show_that_photographs_have_an_up(photo_file: Path) -> None:
    wires, poles = (
        strips(photo_file, EVERYWHERE),
        strips(photo_file, LEVEL + np.pi / 2, 10.0, class_id=0),
    )
    assert choose([wires, poles], windows=8)[0] == (0.0, 0.0, 0.0)


def test_curved_labels_are_no_wires_and_have_no_direction(photo_file: Path) -> None:
    now, said, augment = choose([roots(photo_file)], windows=4)
    assert now == (0.0, 0.0, 0.0)
    assert (augment.wire_classes, augment.drawn_classes) == ((1,), ())
    assert any(
        line.startswith("Curved labels: wire ") and "--draw-wires 0.5 draws some" in line
        for line in said
    )
    assert choose([arcs(photo_file, 0.08)], windows=4)[0] == FROM_ABOVE, "wires sag"
    assert choose([arcs(photo_file, 0.2)], windows=4)[0] == (0.0, 0.0, 0.0), (
        "seams and bends of rivers do not"
    )
    straight = strips(photo_file, EVERYWHERE, class_id=0)
    now, said, augment = choose([roots(photo_file), straight], windows=4)
    assert now == FROM_ABOVE
    assert (augment.wire_classes, augment.drawn_classes) == ((0, 1), (0,)), (
        "wires are drawn as the straight class alone"
    )


def test_wires_are_drawn_as_the_thin_classes_and_refused_without_one(photo_file: Path) -> None:
    wires, poles = strips(photo_file, LEVEL), strips(photo_file, LEVEL, 10.0, class_id=0)
    _, said, augment = choose([wires, poles], draw_wires=0.3)
    assert (augment.draw_wires, augment.wire_classes, said) == (
        0.3,
        (1,),
        ["Wires are drawn as wire; --draw-wires 0: none"],
    )
    with pytest.raises(UsageError, match="no class of the training labels is as thin as wires are"):
        choose([poles], draw_wires=0.3)
    assert choose([wires, poles], paste=0.3)[2].paste == 0.3
    with pytest.raises(UsageError, match="--paste: the training labels hold no object to paste"):
        choose([wires], paste=0.3)


@pytest.mark.parametrize("most", [1, 3, 20, 1024])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 16, 23, 24, 100])
def test_the_largest_batch_that_fits_is_found(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest_that_fits(fits, 640, most)
    assert found <= min(limit, most) < 1.5 * found + 1
    assert max(tried) <= most
    assert len(tried) == len(set(tried))


def test_a_gpu_too_small_for_one_image_is_named() -> None:
    with pytest.raises(UserError, match="not one image of 640 pixels fits the GPU"):
        largest_that_fits(lambda _: False, 640, 9)


def test_a_batch_that_lacks_memory_does_not_fit_and_another_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("an illegal access"),
    ]
    monkeypatch.setattr(batch_size, "build_training", Mock(side_effect=errors))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    arguments: Any = (nn.Identity(), CPU, choose_precision("off", CPU), None)
    assert not batch_size._fits(*arguments)
    with pytest.raises(RuntimeError, match="illegal"):
        batch_size._fits(*arguments)


def test_auto_keeps_the_batch_size_of_a_run_that_continues(tmp_path: Path) -> None:
    assert batch_size.agree_batch_size(0, 12, tmp_path) == 12
    (tmp_path / "config.yaml").write_text("batch_size: 24\n", encoding="utf-8")
    assert batch_size.agree_batch_size(0, 12, tmp_path) == 24
    assert batch_size.agree_batch_size(6, 0, tmp_path) == 6


@pytest.mark.parametrize(
    ("options", "has_gains"),
    [
        ({}, True),
        ({"colour": "loader"}, False),
        ({"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}, False),
    ],
    ids=["auto", "loader", "off"],
)
def test_the_probe_varies_colours_and_a_cpu_needs_none(
    options: dict[str, Any], has_gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[Batch] = []

    def fits(model: nn.Module, device: torch.device, precision: Precision, batch: Batch) -> bool:
        probed.append(batch)
        return len(batch) == 1

    monkeypatch.setattr(batch_size, "_fits", fits)
    model: Any = SimpleNamespace(nc=3)
    gpu, precision = torch.device("cuda", 0), choose_precision("off", CPU)
    assert batch_size.find_batch_size(gpu, precision, model, 64, AugmentOptions(**options), 99) == 1
    assert (probed[0].colour_gains is not None) == has_gains
    found = batch_size.find_batch_size(CPU, precision, model, 64, AugmentOptions(**options), 99)
    assert (found, len(probed)) == (batch_size.CPU_BATCH_SIZE, 2)


def test_each_option_is_declared_once() -> None:
    sections = [
        section
        for section in (*TrainConfig.__mro__, EngineOptions)
        if "__annotations__" in vars(section)
    ]
    names = [
        name for section in sections for name in vars(section)["__annotations__"] if name != "group"
    ]
    # The engine's seed is for tasks that draw random numbers themselves, and None by default.
    assert {name for name in names if names.count(name) > 1} == {"seed"}
    assert {field.name for field in dataclasses.fields(TrainConfig)} <= set(names)


@pytest.mark.parametrize(
    "given",
    [["--local-rank=1"], ["--local_rank=1"], ["--local-rank", "1"], ["--local_rank", "1"], []],
)
def test_the_local_rank_of_a_launcher_is_ignored(given: list[str]) -> None:
    assert without_local_rank(["--epochs", "1", *given, "--seed", "2"]) == [
        "--epochs",
        "1",
        "--seed",
        "2",
    ]


def test_a_training_without_a_model_does_not_end_with_code_0() -> None:
    with pytest.raises(
        UsageError, match="--batch-size 1000000000: must be at least 0 and at most 65536 or auto"
    ):
        TrainConfig(batch_size=10**9)
    progress, options = SimpleNamespace(best_value=None), SimpleNamespace(monitor="val_loss")
    engine: Any = SimpleNamespace(
        progress=progress, options=options, log=SimpleNamespace(print=print), stopped_by=""
    )
    with pytest.raises(
        Diverged, match=r"run: no best\.pt, because val_loss was never a number"
    ) as caught:
        conclude(engine, SimpleNamespace(folder="run"), SimpleNamespace())  # type: ignore[arg-type]
    assert caught.value.exit_code == EXIT_DIVERGED
