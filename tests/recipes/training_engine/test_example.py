"""The example's flags, network and data."""

from __future__ import annotations

import pickle
from pathlib import Path

import distributed_training_example as example
import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from tests.recipes.harness import refused

NOWHERE = "http://127.0.0.1:9/cifar-10-python.tar.gz"


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
    assert {column for _, column in places} == set(range(6, 15)) | set(range(17, 26))  # 10 +- 4, and mirrored


def test_cifar10_is_read_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        content = {"data": np.full((2, 3072), 255, np.uint8), "labels": [1, 9]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: Path(path).exists())
    name, train, val = example.load_datasets("auto", tmp_path)
    assert (name, len(train), len(val)) == ("cifar10", 10, 2)
    picture, label = val[1]
    assert (picture.shape, int(label)) == ((3, 32, 32), 9)
    assert picture[0].tolist() == [[pytest.approx((1 - 0.4914) / 0.2023)] * 32] * 32


def test_without_a_network_cifar10_is_refused_and_the_default_are_the_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CIFAR10, "url", NOWHERE)
    with refused("cannot be downloaded", "put cifar-10-python.tar.gz there, or use --dataset digits"):
        example.load_datasets("cifar10", tmp_path)
    pytest.importorskip("sklearn", reason="needs scikit-learn (recipes/training_engine/requirements.txt)")
    name, train, val = example.load_datasets("auto", tmp_path)
    assert (name, len(train), len(val)) == ("digits", 1437, 360)
    assert "training on scikit-learn's digits instead" in capsys.readouterr().err
    assert train[0][0].shape == (3, 16, 16)
    counts = torch.bincount(torch.cat([train.labels, val.labels]))
    assert len(counts) == 10
    assert counts.min() >= 170
