"""The example: its network and data, its launch, its end."""

import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed_training_example as example
import launching
import numpy as np
import pytest
import torch
import training_engine
from torchvision.datasets import CIFAR10

from tests.support.processes import is_running, wait_until
from tests.support.recipes import assert_refused, run_command
from yolo_seg_ddp.data.images import write_jpeg
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL

# --- The example's flags, network and data --------------------------------------------------------


def test_the_network_is_resnet_20() -> None:
    network = example.ResidualNetwork(10)
    assert sum(weight.numel() for weight in network.parameters()) == 272_474
    for side in (16, 32):
        assert network(torch.zeros(2, 3, side, side)).shape == (2, 10)


def test_augmentation_moves_and_flips_within_the_margin() -> None:
    picture = np.zeros((1, 32, 32, 3), np.uint8)
    picture[0, 16, 10] = 255
    plain, label = example.Pictures(picture, np.array([3]), augment=False, flip=True)[0]
    assert (plain.shape, int(label)) == ((3, 32, 32), 3)
    moved = example.Pictures(picture, np.array([3]), augment=True, flip=True)
    torch.manual_seed(0)
    places = {divmod(int(moved[0][0][0].argmax()), 32) for _ in range(300)}
    assert {row for row, _ in places} == set(range(12, 21))
    # 10 +- 4, and mirrored
    assert {column for _, column in places} == set(range(6, 15)) | set(range(17, 26))


def test_cifar10_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        content = {"data": np.full((2, 3072), 255, np.uint8), "labels": [1, 9]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(
        "torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).exists()
    )
    name, train, val = example.load_datasets("auto", tmp_path)
    assert (name, len(train), len(val)) == ("cifar10", 10, 2)
    picture, label = val[1]
    assert (picture.shape, int(label)) == ((3, 32, 32), 9)
    assert picture[0].tolist() == [[pytest.approx((1 - 0.4914) / 0.2023)] * 32] * 32


def test_without_a_network_cifar10_is_refused_and_the_default_are_the_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with assert_refused(
        "cannot be downloaded", "put cifar-10-python.tar.gz there, or use --dataset digits"
    ):
        example.load_datasets("cifar10", tmp_path)
    pytest.importorskip(
        "sklearn", reason="needs scikit-learn (recipes/training_engine/requirements.txt)"
    )
    name, train, val = example.load_datasets("auto", tmp_path)
    assert (name, len(train), len(val)) == ("digits", 1437, 360)
    assert "training on scikit-learn's digits instead" in capsys.readouterr().err
    assert train[0][0].shape == (3, 16, 16)
    counts = torch.bincount(torch.cat([train.labels, val.labels]))
    assert len(counts) == 10
    assert counts.min() >= 170


def test_a_folder_of_pictures_is_a_data_set(tmp_path: Path) -> None:
    for folder, grey in (
        ("train/hat", 10),
        ("train/shoes", 200),
        ("val/hat", 10),
        ("val/shoes", 200),
    ):
        (tmp_path / folder).mkdir(parents=True)
        write_jpeg(tmp_path / folder / "1.jpg", np.full((60, 90, 3), grey, np.uint8))
    name, train, val = example.load_datasets("folder", tmp_path)
    assert (name, train.augment, val.augment, val.labels.tolist()) == (
        "folder",
        True,
        False,
        [0, 1],
    )
    assert [int(picture.float().mean().round()) for picture in val.pictures] == [10, 200]
    config = example.training_configuration(example.ExampleConfig(), train, val, False)
    assert config["model_fn"]()(torch.stack([train[0][0], val[1][0]])).shape == (2, 2)
    shutil.move(tmp_path / "val/shoes", tmp_path / "val/hats")
    with assert_refused("train has the classes ['hat', 'shoes'], but val ['hat', 'hats']"):
        example.load_datasets("folder", tmp_path)
    (tmp_path / "val/hat/1.jpg").write_bytes(b"no picture")
    with assert_refused("needs pictures in train/CLASS and val/CLASS", "val/hat/1.jpg"):
        example.load_datasets("folder", tmp_path)


# --- Launching: a set-up that fails, a rank that fails, a command that is stopped, and no process
# left


NEEDS = "needs the packages of the recipe (pip install -r recipes/training_engine/requirements.txt)"
pytest.importorskip("cloudpickle", reason=NEEDS)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give the signals back that torchrun's agent takes in this process."""
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def noted(folder: Path) -> dict[str, int]:
    """Return the process ids by the place (rank-world size) of each process that took part."""
    return {file.name: int(file.read_text()) for file in folder.iterdir()}


def test_a_set_up_that_fails_falls_back_to_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def note(rank: int, world_size: int, folder: Path) -> None:
        training_engine.TrainingEngine.setup_distributed(rank, world_size)
        (folder / f"{rank}-{world_size}").write_text(str(os.getpid()))
        training_engine.TrainingEngine.cleanup_distributed()

    training_engine.launch_distributed_training(note, 2, backend="mpi", folder=tmp_path)
    assert noted(tmp_path) == {"0-1": os.getpid()}
    errors = capfd.readouterr().err
    assert "mpi: " in errors
    assert (
        "distributed set-up failed (the reason is printed above): training in a single process"
        in errors
    )


def test_one_process_trains_here() -> None:
    calls = []
    for world_size in (0, 1):
        training_engine.launch_distributed_training(
            lambda *place, **others: calls.append((place, others)), world_size, x=1
        )
    assert calls == [((0, 1), {"x": 1})] * 2


def test_a_rank_that_fails_ends_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(rank: int, world_size: int, **kwargs: Any) -> None:
        (kwargs["folder"] / f"{rank}-{world_size}").write_text(str(os.getpid()))
        if rank == 1:
            while not (kwargs["folder"] / "0-2").exists():
                time.sleep(0.05)
            raise ValueError("the pictures are upside down")
        time.sleep(60)

    before = dict(os.environ)
    with assert_refused("failed on a rank"):
        training_engine.launch_distributed_training(fail, 2, backend="gloo", folder=tmp_path)
    assert "ValueError: the pictures are upside down" in capfd.readouterr().err
    processes = noted(tmp_path)
    assert processes.keys() == {"0-2", "1-2"}
    assert os.getpid() not in processes.values()
    wait_until(lambda: not any(is_running(process) for process in processes.values()))
    assert dict(os.environ) == before


def test_a_stopped_command_continues_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason=NEEDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = (
        "--distributed",
        "--world-size",
        "2",
        "--epochs",
        "1",
        "--batch-size",
        "64",
        "--use-ema",
    )
    run = tmp_path / "cifar10_training"

    def stop() -> None:
        wait_until((run / "metrics.jsonl").exists, timeout_s=60)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    arguments = (*command, "--dataset", "digits", "--save-dir", tmp_path)
    assert run_command(example, *arguments) == EXIT_STOPPED_BY_SIGNAL
    stopper.join()
    assert "run the same command again to resume" in capfd.readouterr().out
    assert run_command(example, *arguments) == EXIT_DONE
    printed = capfd.readouterr().out
    assert "Resumed from" in printed
    assert "Training complete after 1 epoch" in printed
    assert [record["epoch"] for record in read_epochs(run)] == [1]


def test_processes_of_torchrun_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with assert_refused("without torchrun"):
        training_engine.launch_distributed_training(print, 2)


def test_fewer_gpus_than_asked_for_are_all_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launching.plan_ranks(4, "nccl") == (2, "nccl")
    assert "4 processes but 2 visible GPU(s): starting 2" in capsys.readouterr().out
    assert launching.plan_ranks(2, "gloo") == (2, "gloo")
