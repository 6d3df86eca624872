"""Every command runs its CUDA branches, on pretended GPUs (tests/support/pretended), and trains the
bits of a CPU.
"""

import dataclasses
import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks.jobs import difference
from recipes.compressed_ad.tests.small import small_settings, write_small_histories
from tests.support.plugin import PRETENCE, PROJECT, TrainedRun, must_run
from tests.support.pretended import gpu
from tests.support.pretended.tensors import COPIES, PretendedGpu, mark
from tests.support.ranks import RankFailed, run_ranks
from tests.support.recipes import RANK_NAMES, dying
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.data.label_shapes import label_lengths
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.training import loader_cost
from yolo_seg_ddp.utils import environment
from yolo_seg_ddp.utils.options import to_dict
from yolo_seg_ddp.yolo.model import load_weights, save_deployable, trained_size_px

SURER = 8.0  # of the logits of classes, and of the masks' coefficients


def call_main(
    num_gpus: int, script: str, arguments: list[str], log: Path, kill_at: int, draws: bool
) -> dict[str, Any]:
    """Run a command, given as folder/module, in this fresh process; return its exit code and what
    it did on a GPU.

    `copies` counts tensors copied to a GPU. Of the convolutions there, `formats` says whether their
    weights and the network's input are channels_last, and `trained` and `predicted` hold the types
    of their results. The process is killed at its optimizer step number `kill_at`; without `draws`
    it draws no figures.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    if os.environ["WORLD_SIZE"] == "1":  # some commands start ranks of their own
        for name in RANK_NAMES:
            del os.environ[name]
    folder, _, module = script.rpartition("/")
    sys.path.insert(0, str(PROJECT / folder))
    sys.argv = [script, *arguments]
    seen: dict[str, Any] = {"copies": 0, "trained": set(), "predicted": set(), "formats": set()}
    if num_gpus:
        os.environ.update(PRETEND_GPUS=str(num_gpus), PYTHONPATH=str(PRETENCE))
        gpu.switch_on(num_gpus)
        environment._GPU_DRIVER_FILES = ("/", "/", "/")  # one that exists
        # As if the GPU waited for its photographs: here it is slower than any loader.
        loader_cost.MUCH_WAIT, loader_cost.FEWEST_BATCHES, loader_cost.FEWEST_ROUNDS = -1, 1, 0
        vars(loader_cost)["usable_cpu_count"] = lambda: 0

        def note(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(module, torch.nn.Conv2d) and inputs[0].device.type == "cuda":
                seen["trained" if output.requires_grad else "predicted"].add(output.dtype)
                # the network's input
                tensors = (module.weight, inputs[0]) if not seen["formats"] else (module.weight,)
                seen["formats"] |= {
                    tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors
                }

        torch.nn.modules.module.register_module_forward_hook(note)
    if not draws:
        pictures: Any = importlib.import_module("yolo_seg_ddp.training.pictures")
        pictures.plot_label_statistics = pictures.plot_training_curves = lambda *_, **__: None
    command = importlib.import_module(module)
    with dying(importlib.import_module("yolo_seg_ddp.engine").TrainingEngine, "update", kill_at):
        seen["code"] = int(command.main() or 0)
    if num_gpus:
        seen["copies"] = COPIES[0]
    seen["deterministic"] = (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    return seen


def run(
    folder: Path,
    num_gpus: int,
    script: str,
    line: str,
    ranks: int = 1,
    kill_at: int = 0,
    draws: bool = True,
) -> list[dict[str, Any]]:
    log = folder / "printed.txt"
    words = line.split()
    try:
        return run_ranks(
            call_main,
            ranks,
            num_gpus,
            script,
            words,
            log,
            kill_at,
            draws,
            join=False,
            timeout_s=240,
        )
    except RankFailed as error:
        if kill_at:
            return []
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error


@pytest.fixture(scope="module")
def few(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Return the trained run with a data set that trains on its five validation photographs: fp16
    is slow on a CPU.

    The first object of each has a rough outline, the last one a box.
    """
    root = tmp_path_factory.mktemp("few")
    for split in ("train", "val"):
        shutil.copytree(trained.processed / "val", root / split)
    (root / "train/ignore").mkdir()
    for file in (root / "train/labels").iterdir():
        (root / "train/ignore" / file.name).write_text(file.read_text().partition("\n")[0])
        with file.open("a") as stream:
            stream.write("0 0.5 0.5 0.3 0.3\n")
    data = root / "dataset.yaml"
    shutil.copyfile(trained.data, data)
    return dataclasses.replace(trained, data=data, processed=root)


# -- every command ---------------------------------------------------------------------------------


def sure(folder: Path, trained: TrainedRun) -> dict[str, Path]:
    """Make the run's model with higher confidences and fuller masks, so that detections become
    lines: it has hardly learnt.
    """
    model: Any = load_weights(str(trained.folder / "best.pt"))
    head = model.model[-1]
    for branch in [*head.cv3, *head.cv4]:
        branch[-1].bias.data += SURER
    save_deployable(
        folder / "sure.pt", model, {}, img_size=trained_size_px(model), data=str(trained.data)
    )
    return {"sure": folder / "sure.pt"}


def crowd(folder: Path, trained: TrainedRun) -> dict[str, Path]:
    from recipes.crowd_bt.tests.small import write_data

    return {"crowd": write_data(folder)}


def underwater(folder: Path, trained: TrainedRun) -> dict[str, str]:
    from recipes.underwater_ir.tests.small import write_losses, write_photographs
    from recipes.underwater_ir.tests.test_training import arguments_of

    write_photographs(folder / "photographs", 3)
    places = f"--images {folder}/photographs --output {folder}"
    made = f"{places} --num-train 4 --num-test 2 --size 24".split()
    must_run("python", "recipes/underwater_ir/make_data.py", *made)
    write_losses(folder)
    arguments = arguments_of(folder, folder / "student.pt")
    arguments[arguments.index("--device") + 1] = "cuda"
    return {"student": " ".join(arguments)}


def rooms(folder: Path, trained: TrainedRun) -> dict[str, Path]:
    settings = small_settings(folder)
    write_small_histories(settings)
    (folder / "small.yaml").write_text(yaml.safe_dump(to_dict(settings)))
    return {"settings": folder / "small.yaml"}


def nothing(folder: Path, trained: TrainedRun) -> dict[str, str]:
    return {}


# The script as folder/module, its command line, and what makes what only it needs.
COMMANDS: dict[str, tuple[str, str, Callable[[Path, TrainedRun], Mapping[str, str | Path]]]] = {
    "train": (
        "train_yolo_ddp",
        "--data {data} --save-dir {out}/run --model yolo11n-seg.yaml --img-size 64 --batch-size 2 "
        "--epochs 1 "
        "--amp fp16 --accumulate 2 --multi-scale --deterministic --windows 5",
        nothing,
    ),
    "evaluate": (
        "evaluate_model",
        "--model {best} --data {data} --img-size 64 --amp auto --tiles 96 --output {out} "
        "--thin-classes {classes}",
        nothing,
    ),
    "infer": (
        "inference",
        "--model {sure} --source {photos} --tiles 96 --conf 0.00001 --output {out}",
        sure,
    ),
    "profile": (
        "profile_gpu",
        "--model yolov8n-seg.yaml --batch-sizes 1 --steps 1 --img-size 64 --output {out}",
        nothing,
    ),
    "benchmark": (
        "benchmark_ddp",
        "--batch-size 2 --steps 1 --repeats 1 --img-size 64 --output {out}",
        nothing,
    ),
    "check machine": ("test_ddp", "--data {data}", nothing),
    "crowd_bt": (
        "recipes/crowd_bt/train",
        "--backbone test_resnet --no-pretrained --input-size 32 --amp --epochs 1 --batch-size 16 "
        "--num-workers 0 "
        "--data-dir {crowd} --image-dir {crowd}/images --checkpoint-dir {out}",
        crowd,
    ),
    "compressed_ad": ("recipes/compressed_ad/train", "{settings}", rooms),
    "underwater_ir": (
        "recipes/underwater_ir/underwater_ir.student.train_student",
        "{student} --epochs 1",
        underwater,
    ),
    "underwater_ir from real pairs": (
        "recipes/underwater_ir/underwater_ir.student.train_student",
        "{student} --epochs 1 --network curves --folds 2",
        underwater,
    ),
    "a recipe's step": (
        "benchmarks.gpu.recipes",
        "{out}.json 1 recipes/compressed_ad/train {settings}",
        rooms,
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_on_a_gpu(name: str, few: TrainedRun, tmp_path: Path) -> None:
    script, line, make = COMMANDS[name]
    words = {
        "out": tmp_path / "out",
        "data": few.data,
        "best": few.folder / "best.pt",
        "photos": few.processed / "val" / "images",
        **make(tmp_path, few),
        # nobody knows which it finds
        "classes": " ".join(yaml.safe_load(few.data.read_text())["names"].values()),
    }
    (seen,) = run(tmp_path, 1, script, line.format(**words))
    printed = (tmp_path / "printed.txt").read_text()
    assert seen["code"] == 0, printed
    assert seen["copies"] > 0 or "on up to 1 x Pretended GPU" in printed, f"used no GPU\n{printed}"
    if name in ("train", "evaluate"):
        assert seen["formats"] == {True}
    if name == "train":
        assert seen["trained"] == {torch.float16}
        assert seen["deterministic"] == (True, "highest")
        assert (
            len(re.findall(r"A GPU needs about [1-9]\d* cores for \d+ images/s", printed)) == 1
        ), printed
        found = load_latest(tmp_path / "out" / "run" / "checkpoint")
        assert found is not None
        assert found[1]["scaler"]["scale"] > 1
    if name == "evaluate":
        assert seen["predicted"] == {torch.bfloat16}
    if name == "a recipe's step":
        steps = yaml.safe_load((tmp_path / "out.json").read_text())["steps"]
        # of fp32, bf16 and fp16
        assert len({figures["train_loss"] for figures in steps.values()}) == 3


# -- the bits of a CPU -----------------------------------------------------------------------------


def train(folder: Path, device: str, trained: TrainedRun, kill_at: int = 0) -> None:
    """Train on windows with two ranks on pretended GPUs or on the CPU, as its own command."""
    folder.mkdir(exist_ok=True)
    line = (
        f"--data {trained.data} --save-dir {folder}/run --model yolov8n-seg.yaml --img-size 64 "
        "--batch-size 1 --epochs 2 "
        "--windows 2 --degrees 90 --draw-wires 0.5 --amp off --colour loader --sync-bn off "
        "--class-weights root --num-workers 0 --threads 1 "
        f"--no-tensorboard --val-pictures-every 0 --device {device}"
    )
    seen = run(
        folder,
        2 * (device == "cuda"),
        "train_yolo_ddp",
        line,
        ranks=2,
        kill_at=kill_at,
        draws=False,
    )
    assert bool(kill_at) or [one["code"] for one in seen] == [0, 0]


def labels_of(few: TrainedRun) -> list[float]:
    """Return how long the labels of its photographs are, read from their files."""
    class_ids, lengths = [], []
    for file in sorted((few.processed / "train" / "labels").glob("*.txt")):
        height, width = read_image(file.parents[1] / "images" / f"{file.stem}.jpg").shape[:2]
        for class_id, *outline in map(str.split, file.read_text().splitlines()):
            class_ids.append(int(class_id))
            points = np.array(outline, float).reshape(-1, 2) * (width, height)
            # Of a box the second point is its size.
            lengths.append((points[1] if len(points) == 2 else np.ptp(points, axis=0)).max())
    return label_lengths(np.array(class_ids), np.array(lengths))


def test_a_training_killed_and_resumed_on_two_gpus_has_the_bits_of_two_cpu_processes(
    few: TrainedRun, tmp_path: Path
) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    train(cpu, "cpu", few)
    train(gpu, "cuda", few, kill_at=8)
    assert not (gpu / "run" / "status.json").read_text().count("finished")
    train(gpu, "cuda", few)
    assert "Resumed from" in (gpu / "printed.txt").read_text()
    assert difference(gpu / "run", cpu / "run") == ""
    lengths = labels_of(few)
    assert len(lengths) >= 6, "of two classes"
    for folder in (cpu, gpu):
        written = load_weights(str(folder / "run" / "best.pt")).args["label_lengths"]
        np.testing.assert_allclose(written, lengths, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda gpu: gpu > 0, "NCCL does not send torch.bool"),
        (lambda gpu: gpu.transpose(0, 1), "not contiguous"),
        (lambda gpu: torch.zeros(3), "not on the GPU"),
    ],
)
def test_what_nccl_does_not_send_is_refused(
    fault: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    tensor = mark(torch.ones(2, 3), 0)
    gpu.require_sendable(tensor)
    with pytest.raises(AssertionError, match=message), PretendedGpu():
        gpu.require_sendable(fault(tensor))
