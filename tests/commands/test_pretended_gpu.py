"""Every command runs its CUDA branches, on pretended GPUs (tests/support/pretended), and trains the bits of a CPU."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.conftest import PRETENCE, PROJECT, TrainedRun, must_run
from tests.recipes.compressed_ad.small import small_settings, write_small_histories
from tests.support.ranks import RankFailed, run_ranks
from utils.common import environment
from utils.distributed import read_rank_environment, setup_ddp
from utils.distributed.sync_bn import convert_sync_batchnorm
from utils.run.checkpoint import load_latest
from utils.yolo.model import load_weights, save_deployable, trained_size_px

SIZE = ("--img-size", "64")
SURER = 6.0  # of the logits of classes
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def call_main(num_gpus: int, script: str, arguments: list[str], log: Path, kill_at: int, draws: bool) -> dict[str, Any]:
    """Run a command, given as folder/module, in this fresh process; return its exit code and what it did on a GPU.

    `copies` counts tensors copied to a GPU. Of the convolutions there, `formats` says whether their weights and the
    network's input are channels_last, and `trained` and `predicted` hold the types of their results.
    The process is killed at its optimizer step number `kill_at`; without `draws` it draws no figures.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    if os.environ["WORLD_SIZE"] == "1":  # some commands start ranks of their own
        for name in RANK_NAMES:
            del os.environ[name]
    folder, _, module = script.rpartition("/")
    sys.path[:0] = [str(PROJECT / folder), str(PRETENCE)]
    sys.argv = [script, *arguments]
    seen: dict[str, Any] = {"copies": 0, "trained": set(), "predicted": set(), "formats": set()}
    if num_gpus:
        os.environ.update(PRETEND_GPUS=str(num_gpus), PYTHONPATH=os.pathsep.join([str(PRETENCE), str(PROJECT)]))
        pretended_gpu = importlib.import_module("pretended_gpu")
        pretended_gpu.switch_on(num_gpus)
        environment._GPU_DRIVER_FILES = ("/", "/", "/")  # one that exists
        watch_convolutions(seen)
    if kill_at:
        kill_at_step(kill_at)
    if not draws:
        pictures: Any = importlib.import_module("utils.training.pictures")
        pictures.plot_label_statistics = pictures.plot_training_curves = lambda *_: None
    lines: Any = importlib.import_module("utils.predict.lines")
    lines.MIN_SCORE = 0.0  # the network has hardly learnt
    command = importlib.import_module(module)
    seen["code"] = int(command.main() or 0)
    if num_gpus:
        seen["copies"] = pretended_gpu.COPIES[0]
    seen["deterministic"] = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return seen


def watch_convolutions(seen: dict[str, Any]) -> None:
    def note(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Conv2d) and inputs[0].device.type == "cuda":
            seen["trained" if output.requires_grad else "predicted"].add(output.dtype)
            tensors = (module.weight, inputs[0]) if not seen["formats"] else (module.weight,)  # the network's input
            seen["formats"] |= {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors}

    torch.nn.modules.module.register_module_forward_hook(note)


def kill_at_step(number: int) -> None:
    from utils.engine.step import Step

    update, steps_left = Step.update, [number]

    def counted(self: Step) -> None:
        steps_left[0] -= 1
        if not steps_left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        update(self)

    Step.update = counted  # type: ignore[method-assign]


def run(
    folder: Path,
    num_gpus: int,
    script: str,
    *arguments: str | Path,
    ranks: int = 1,
    kill_at: int = 0,
    draws: bool = True,
) -> list[dict[str, Any]]:
    log = folder / "printed.txt"
    arguments_ = [str(argument) for argument in arguments]
    try:
        return run_ranks(call_main, ranks, num_gpus, script, arguments_, log, kill_at, draws, join=False, timeout_s=240)
    except RankFailed as error:
        if kill_at:
            return []
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error


@pytest.fixture(scope="module")
def few(trained: TrainedRun) -> TrainedRun:
    """Return the trained run with a data set that trains on its five validation photographs: fp16 is slow on a CPU."""
    data = trained.processed / "few.yaml"
    content = yaml.safe_load(trained.data.read_text())
    data.write_text(yaml.safe_dump({**content, "train": content["val"]}))
    return dataclasses.replace(trained, data=data)


# -- every command --------------------------------------------------------------------------------------------------------


def classes_of(trained: TrainedRun) -> list[str]:
    """Return all classes: the network has hardly learnt, and nobody knows which it finds."""
    names: dict[int, str] = yaml.safe_load(trained.data.read_text())["names"]
    return list(names.values())


def sure(trained: TrainedRun, folder: Path) -> Path:
    """Return the run's model with higher confidences, so that detections become lines: it has hardly learnt."""
    model: Any = load_weights(str(trained.folder / "best.pt"))
    for branch in model.model[-1].cv3:
        branch[-1].bias.data += SURER
    save_deployable(folder / "sure.pt", model, {}, img_size=trained_size_px(model), data=str(trained.data))
    return folder / "sure.pt"


def crowd(folder: Path, trained: TrainedRun) -> list[str]:
    from tests.recipes.crowd_bt.small import write_data

    data = write_data(folder)
    return [
        *("--backbone", "test_resnet", "--no-pretrained", "--input-size", "32", "--amp", "--epochs", "1"),
        *("--batch-size", "16", "--data-dir", str(data), "--image-dir", str(data / "images"), "--num-workers", "0"),
        *("--checkpoint-dir", str(folder / "run")),
    ]


def underwater(folder: Path, trained: TrainedRun) -> list[str]:
    from tests.recipes.underwater_ir.small import write_losses, write_photographs
    from tests.recipes.underwater_ir.test_training import arguments_of

    write_photographs(folder / "photographs", 3)
    made: list[str] = [
        *("--images", str(folder / "photographs"), "--output", str(folder), "--num-train", "4"),
        "--num-test",
        "2",
    ]
    must_run("python", "recipes/underwater_ir/make_data.py", *made, "--size", "24")
    write_losses(folder)
    arguments = arguments_of(folder, folder / "student.pt")
    arguments[arguments.index("--device") + 1] = "cuda"
    return [*arguments, "--epochs", "1"]


def rooms(folder: Path, trained: TrainedRun) -> list[str]:
    settings = small_settings(folder)
    write_small_histories(settings)
    (folder / "small.yaml").write_text(yaml.safe_dump(settings.plain()))
    return [str(folder / "small.yaml")]


COMMANDS: dict[str, tuple[str, Callable[[Path, TrainedRun], list[str]]]] = {
    "train": (
        "train_yolo_ddp",
        lambda folder, trained: [
            *("--data", str(trained.data), "--save-dir", str(folder / "run"), "--model", "yolo11n-seg.yaml", *SIZE),
            *("--batch-size", "2", "--epochs", "1", "--amp", "fp16", "--accumulate", "2", "--multi-scale"),
            "--deterministic",
        ],
    ),
    "evaluate": (
        "evaluate_model",
        lambda folder, trained: [
            *("--model", str(trained.folder / "best.pt"), "--data", str(trained.data), *SIZE, "--amp", "auto"),
            *("--tiles", "96", "--output", str(folder / "evaluation"), "--thin-classes", *classes_of(trained)),
        ],
    ),
    "infer": (
        "inference",
        lambda folder, trained: [
            *("--model", str(trained.folder / "best.pt"), "--source", str(trained.processed / "val" / "images")),
            *("--tiles", "96", "--output", str(folder / "predictions")),
        ],
    ),
    "infer lines": (
        "inference",
        lambda folder, trained: [
            *("--model", str(sure(trained, folder)), "--source", str(trained.processed / "val" / "images")),
            *("--conf", "0.00001", "--output", str(folder / "predictions"), "--thin-classes", *classes_of(trained)),
        ],
    ),
    "export": (
        "export",
        lambda folder, trained: [
            *("--model", str(trained.folder / "best.pt"), "--data", str(trained.data), *SIZE, "--format"),
            *("torchscript", "--max-images", "2", "--output", str(folder / "export")),
        ],
    ),
    "profile": (
        "profile_gpu",
        lambda folder, trained: [
            *("--model", "yolov8n-seg.yaml", "--batch-sizes", "1", "--steps", "1", *SIZE),
            *("--output", str(folder / "profile")),
        ],
    ),
    "benchmark": (
        "benchmark_ddp",
        lambda folder, trained: [
            *("--batch-size", "2", "--steps", "1", "--warmup", "1", "--repeats", "1", "--scaling", "strong", *SIZE),
            *("--output", str(folder / "benchmark")),
        ],
    ),
    "check data": (
        "check_data",
        lambda folder, trained: [
            *("--model", str(trained.folder / "best.pt"), "--data", str(trained.data)),
            *("--output", str(folder / "check"), "--tolerate"),
        ],
    ),
    "choose what to label": (
        "check_data",
        lambda folder, trained: [
            *("--model", str(trained.folder / "best.pt"), "--data", str(trained.data), "--tiles", "96", "--next", "2"),
            *("--unlabelled", str(trained.processed / "train" / "images"), "--output", str(folder / "next")),
        ],
    ),
    "check machine": ("test_ddp", lambda folder, trained: ["--data", str(trained.data)]),
    "crowd_bt": ("recipes/crowd_bt/train", crowd),
    "compressed_ad": ("recipes/compressed_ad/train", rooms),
    "underwater_ir": ("recipes/underwater_ir/underwater_ir.student.train_student", underwater),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_on_a_gpu(name: str, few: TrainedRun, tmp_path: Path) -> None:
    script, arguments = COMMANDS[name]
    (seen,) = run(tmp_path, 1, script, *arguments(tmp_path, few))
    printed = (tmp_path / "printed.txt").read_text()
    assert seen["code"] == 0, printed
    assert seen["copies"] > 0 or "on up to 1 x Pretended GPU" in printed, f"used no GPU\n{printed}"
    if name in ("train", "evaluate"):
        assert seen["formats"] == {True}
    if name == "train":
        assert seen["trained"] == {torch.float16}
        assert seen["deterministic"] == (True, "highest")
        found = load_latest(tmp_path / "run" / "checkpoint")
        assert found is not None
        assert found[1]["scaler"]["scale"] > 1
    if name == "infer lines":
        assert "centreline" in (tmp_path / "predictions" / "predictions.json").read_text()
    if name == "evaluate":
        assert seen["predicted"] == {torch.bfloat16}


# -- the bits of a CPU ------------------------------------------------------------------------------------------------------


def train(folder: Path, device: str, trained: TrainedRun, *flags: str, ranks: int = 1, kill_at: int = 0) -> None:
    """Train three steps an epoch on pretended GPUs or on the CPU, as its own command."""
    folder.mkdir(exist_ok=True)
    flags += ("--model", "yolov8n-seg.yaml", "--batch-size", str(2 // ranks), "--num-workers", "0", *SIZE)
    flags += (
        "--device",
        device,
        "--data",
        str(trained.data),
        "--colour",
        "loader",
        "--sync-bn",
        "off",
        "--threads",
        "1",
        "--no-tensorboard",
        "--val-pictures-every",
        "0",
    )
    num_gpus = ranks if device == "cuda" else 0
    how: Any = {"ranks": ranks, "kill_at": kill_at, "draws": False}
    seen = run(folder, num_gpus, "train_yolo_ddp", "--save-dir", folder / "run", *flags, **how)
    assert bool(kill_at) or [one["code"] for one in seen] == [0] * ranks


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's newest checkpoint: weights, moving average, statistics, momenta."""
    found = load_latest(folder / "run" / "checkpoint")
    assert found is not None
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(found[1])
    return {str(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def test_a_training_that_was_killed_and_resumed_on_a_gpu_has_the_bits_of_a_cpu(few: TrainedRun, tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    train(cpu, "cpu", few, "--amp", "off", "--epochs", "2")
    train(gpu, "cuda", few, "--amp", "off", "--epochs", "2", kill_at=4)
    assert not (gpu / "run" / "status.json").read_text().count("finished")
    train(gpu, "cuda", few, "--amp", "off", "--epochs", "2")
    assert "Resumed from" in (gpu / "printed.txt").read_text()
    expected = tensors_of(cpu)
    assert len(expected) > 1000
    assert differing(expected, tensors_of(gpu)) == []


def test_a_training_on_windows_on_two_gpus_has_the_bits_of_two_cpu_processes(few: TrainedRun, tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    windows = ("--amp", "off", "--epochs", "1", "--windows", "2", "--degrees", "90", "--draw-wires", "0.5")
    train(cpu, "cpu", few, *windows, ranks=2)
    train(gpu, "cuda", few, *windows, ranks=2)
    assert differing(tensors_of(cpu), tensors_of(gpu)) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda gpu: gpu > 0, "NCCL does not send torch.bool"),
        (lambda gpu: gpu.transpose(0, 1), "not contiguous"),
        (lambda gpu: torch.zeros(3), "not on the GPU"),
    ],
)
def test_what_nccl_does_not_send_is_refused(
    fault: Callable[[torch.Tensor], torch.Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PRETENCE))
    pretended_gpu = importlib.import_module("pretended_gpu")
    gpu = pretended_gpu._mark(torch.ones(2, 3), 0)
    pretended_gpu.require_sendable(gpu)
    with pytest.raises(AssertionError, match=message), pretended_gpu._PretendedGpu():
        pretended_gpu.require_sendable(fault(gpu))


def normalise_on_two_gpus() -> list[np.ndarray]:
    """Normalise this rank's half of a batch; return the outputs, the inputs' gradients and the running variance."""
    sys.path.insert(0, str(PRETENCE))
    importlib.import_module("pretended_gpu").switch_on(2)
    ranks = read_rank_environment()
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    setup_ddp(device, ranks)
    torch.manual_seed(0)
    layer: Any = convert_sync_batchnorm(torch.nn.BatchNorm2d(3)).to(device)
    inputs: Any = torch.randn(4, 3, 5, 5)[2 * ranks.rank : 2 * ranks.rank + 2].to(device).requires_grad_()
    outputs = layer(inputs)
    outputs.pow(3).sum().backward()
    return [tensor.detach().cpu().numpy() for tensor in (outputs, inputs.grad, layer.running_var)]


def test_synchronised_batchnorm_sends_what_nccl_takes_and_normalises_like_one_gpu() -> None:
    first, second = run_ranks(normalise_on_two_gpus, 2, join=False)
    torch.manual_seed(0)
    layer: Any = torch.nn.BatchNorm2d(3)
    inputs: Any = torch.randn(4, 3, 5, 5).requires_grad_()
    outputs = layer(inputs)
    outputs.pow(3).sum().backward()
    for number, expected in enumerate((outputs.detach(), inputs.grad)):
        np.testing.assert_allclose(np.concatenate([first[number], second[number]]), expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(first[2], layer.running_var, rtol=1e-5)
