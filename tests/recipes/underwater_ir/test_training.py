"""The training command on two ranks: equal to one rank, resumable after a kill, launched as the guide says."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from underwater_ir.commands import evaluate, export_pseudo_labels, make_data, restore
from underwater_ir.data.datasets import RestorationDataset, benchmark_entries, create_evaluation_loader
from underwater_ir.student import train_student
from underwater_ir.student.losses import WEIGHTS, StudentLoss
from underwater_ir.student.restoration import Restoration, measure, summarise

from tests.conftest import PROJECT, free_port, run_main, run_script
from tests.recipes.underwater_ir.small import (
    SIZE_PX,
    WIDTH,
    batch,
    photograph,
    student,
    write_losses,
    write_photographs,
)
from tests.support.ranks import RankFailed, run_ranks
from utils.common.config import parse_config
from utils.common.errors import UsageError, UserError
from utils.data.images import read_image
from utils.data.loader import ShardBatches
from utils.distributed.ddp import wrap_for_ranks
from utils.engine import stopping

pytestmark = pytest.mark.usefixtures("one_thread")
KILL_AT = 4  # the second batch of the second epoch
SET, UNPAIRED = "simulated", "simulated-unpaired"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a data set of 15 training pairs by the recipe's own command."""
    folder = tmp_path_factory.mktemp("data")
    write_photographs(folder / "photographs", 3)
    arguments = ["--images", folder / "photographs", "--output", folder, "--num-train", "15", "--num-test", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_data.py", *map(str, arguments), "--size", "24"])
        make_data.main()
    write_losses(folder)
    return folder


def arguments_of(data: Path, save_path: Path) -> list[str]:
    return [
        *("--train-root", str(data / "Dataset" / "train")),
        *("--val-ref-root", str(data / "Dataset" / "testset(ref)")),
        *("--val-nonref-root", str(data / "Dataset" / "testset(non-ref)")),
        *("--pseudo-root", str(data / "pseudo-labels" / "daclip")),
        *("--epochs", "2", "--batch-size", "4", "--img-size", str(SIZE_PX), "--width", str(WIDTH), "--device", "cpu"),
        *("--loss-config", str(data / "losses.json"), "--lr", "1e-3", "--num-workers", "0", "--no-recompute"),
        *("--save-path", str(save_path)),
    ]


def train(data: Path, save_path: Path, kill_at: int = 0) -> int:
    """Run the training command on this rank; on rank 1 kill the process at training batch number `kill_at`."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # outlives one training
    stopping.STOP_CHECK_STEPS = 1
    train_student.SAVE_EVERY_S = 0
    batches_left = kill_at if os.environ["RANK"] == "1" else 0
    compute = StudentLoss.__call__

    def counted(self: StudentLoss, outputs: Any, targets: Any) -> Any:
        nonlocal batches_left
        batches_left -= 1
        if batches_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(self, outputs, targets)

    StudentLoss.__call__ = counted  # type: ignore[method-assign]
    sys.argv = ["train_student", "--ddp", *arguments_of(data, save_path)]
    code = train_student.main()
    StudentLoss.__call__ = compute  # type: ignore[method-assign]
    return code


def gradients_of_share(share: slice) -> tuple[float, list[np.ndarray]]:
    """Return the reported loss and the gradients after one batch of five pictures, of which this rank has `share`."""
    network, samples = student(text_dim=6), {name: part[share] for name, part in batch(5, text_dim=6).items()}
    wrapped = wrap_for_ranks(network, torch.device("cpu"), 0) if torch.distributed.is_initialized() else network
    loss, values = StudentLoss(WEIGHTS)(wrapped(samples), samples)
    loss.backward()
    gradients = [weight.grad for weight in network.parameters()]
    return float(values["loss"]), [gradient.numpy() for gradient in gradients if gradient is not None]


def measured(data: Path, rank: int, world_size: int) -> np.ndarray:
    labels = data / "pseudo-labels" / "daclip"
    entries = benchmark_entries(data / "Dataset" / "testset(ref)", labels / "testset_ref", True)
    entries += benchmark_entries(data / "Dataset" / "testset(non-ref)", labels / "testset_nonref", False)
    dataset = RestorationDataset(entries[:5], SIZE_PX, (10, 20, 10, 0))
    loader = create_evaluation_loader(dataset, 2, sampler=ShardBatches(len(dataset), 2, rank, world_size))
    with torch.no_grad():
        return measure(student(), dataset, loader, torch.device("cpu"))


def compare_then_die(data: Path, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    loss, gradients = gradients_of_share(slice(0, 3) if rank == 0 else slice(3, 5))
    np.savez(folder / f"rank{rank}.npz", *gradients, loss=loss, measured=measured(data, rank, 2))
    train(data, folder / "whole.pt")
    train(data, folder / "killed.pt", KILL_AT)


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare on two ranks, train without a disturbance, train with a kill, and continue that."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(compare_then_die, 2, data, folder, join=False, timeout_s=150)
    assert run_ranks(train, 2, data, folder / "killed.pt", join=False, timeout_s=150) == [0, 0]
    return folder


def test_unequal_shares_of_two_ranks_have_the_gradient_of_one(two_ranks: Path) -> None:
    loss, expected = gradients_of_share(slice(0, 5))
    saved = [np.load(two_ranks / f"rank{rank}.npz") for rank in (0, 1)]
    for number, gradient in enumerate(expected):
        scale = max(float(np.abs(gradient).max()), 1e-3)
        gaps = [float(np.abs(part[f"arr_{number}"] - gradient).max()) / scale for part in saved]
        assert max(gaps) <= 1e-4, (number, gaps)  # rounding of the phases of small amplitudes: up to 2e-5
    assert any(float(np.abs(gradient).max()) > 0.01 for gradient in expected)
    assert (3 * saved[0]["loss"] + 2 * saved[1]["loss"]) / 5 == pytest.approx(loss, rel=1e-5)


def test_the_metrics_of_two_ranks_are_those_of_one(two_ranks: Path, data: Path) -> None:
    expected = measured(data, 0, 1)
    assert np.isfinite(expected).all()
    for rank in (0, 1):
        assert np.load(two_ranks / f"rank{rank}.npz")["measured"] == pytest.approx(expected, abs=1e-6)


def test_a_killed_rank_costs_nothing_after_a_resume(two_ranks: Path) -> None:
    whole, killed = (torch.load(two_ranks / f"{name}.pt", weights_only=True) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert not any(name.startswith("module.") for name in whole)
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    states = [sorted((two_ranks / f"{name}_run" / "checkpoint").iterdir())[-1] for name in ("whole", "killed")]
    saved = [torch.load(state / "state.pt", weights_only=True) for state in states]
    assert saved[0]["progress"]["global_step"] == saved[1]["progress"]["global_step"] == 4  # 2 epochs of 2
    moments = [[entry["exp_avg_sq"] for entry in state["optimizer"]["state"].values()] for state in saved]
    assert all(torch.equal(one, other) for one, other in zip(*moments, strict=True))
    metrics = (two_ranks / "killed_run" / "metrics.jsonl").read_text().splitlines()
    steps = [record["global_step"] for record in map(json.loads, metrics) if record["kind"] == "batch"]
    assert len(steps) == len(set(steps))


def test_the_guides_launch_prints_the_guides_lines(data: Path, tmp_path: Path) -> None:
    port, save_path = str(free_port()), tmp_path / "experiments" / "x.pt"
    roots: dict[str, Any] = {
        "TRAIN_ROOT": str(data / "Dataset" / "train"),
        "VAL_REF_ROOT": str(data / "Dataset" / "testset(ref)"),
        "VAL_NONREF_ROOT": str(data / "Dataset" / "testset(non-ref)"),
        "PSEUDO_ROOT": str(data / "pseudo-labels" / "daclip"),
        "SAVE_PATH": str(save_path),
    }
    extra = ("--no-recompute", "--width", str(WIDTH), "--loss-config", str(write_losses(tmp_path)))
    script = PROJECT / "recipes" / "underwater_ir" / "train_ddp.sh"
    done = run_script(
        "bash", str(script), "2", "4", "1", str(SIZE_PX), "--", *extra, MASTER_PORT=port, OMP_NUM_THREADS="1", **roots
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "✅ DDP enabled: training on 2 CPU processes" in lines
    assert "15 training pictures, total batch 2 x 4 = 8" in done.stdout
    for start in ("Epoch 1/1 - Train loss: ", f"[Ref] {SET}: PSNR=", f"[Non-Ref] {UNPAIRED}: UIQM="):
        assert len([line for line in lines if line.startswith(start)]) == 1, start
    assert any(" dB, SSIM=0." in line for line in lines)
    assert torch.load(save_path, weights_only=True).keys() == student().state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (("2",), {"TRAIN_ROOT": "nowhere"}, "nowhere has no folders input and target; python make_data.py"),
        (("2", "4", "x"), {}, "`x` is not a whole number above 0"),
        (("2", "4", "1", "16", "--width"), {}, "unexpected `--width`: trainer options stand after --"),
        (("2",), {"MASTER_PORT": "many"}, "MASTER_PORT=many is not a port"),
    ],
)
def test_the_script_refuses_in_one_line(arguments: tuple[str, ...], environment: dict[str, Any], reason: str) -> None:
    script = PROJECT / "recipes" / "underwater_ir" / "train_ddp.sh"
    fake: dict[str, Any] = {"PYTHON": "echo"}  # nothing is started before the check
    done = run_script("bash", script, *arguments, timeout_s=60, **{**fake, **environment})
    assert done.returncode in (1, 2)
    assert reason in done.stderr
    assert done.stdout.count("\n") == 0


def test_defaults_are_the_guides_and_both_spellings_work() -> None:
    arguments = train_student.with_hyphens(
        ["--local_rank=1", "--world_size", "2", "--save-path", "my_file.pt", "--ddp"]
    )
    config = parse_config(train_student.StudentConfig, "", arguments)
    assert (config.local_rank, config.world_size, config.save_path, config.ddp) == (1, 2, "my_file.pt", True)
    assert (config.epochs, config.batch_size, config.img_size, config.lr, config.width) == (10, 4, 256, 1e-4, 64)
    assert config.save_dir == "my_file_run"


def test_flags_make_a_rank_where_no_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # restored after the test
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="--local-rank 1: must be below --world-size, 1"):
        train_student.find_ranks(train_student.StudentConfig(ddp=True, local_rank=1))
    config = train_student.StudentConfig(ddp=True, local_rank=1, world_size=2)
    found = train_student.find_ranks(config)
    assert (found.rank, found.local_rank, found.world_size) == (1, 1, 2)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "12355")
    assert (
        train_student.find_ranks(train_student.StudentConfig(ddp=True, local_rank=0)).rank == 1
    )  # the environment wins
    with pytest.raises(UsageError, match="2 processes without --ddp: add --ddp"):
        train_student.find_ranks(train_student.StudentConfig())


def test_other_losses_are_refused_at_a_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*arguments_of(data, tmp_path / "x.pt"), "--epochs", "1"]
    file = str(write_losses(tmp_path))
    arguments[arguments.index("--loss-config") + 1] = file
    assert run_main(train_student, monkeypatch, *arguments) == 0
    printed = capsys.readouterr().out
    assert "Epoch 1/1 - Train loss: " in printed
    assert "Pseudo-labels: colour scores, not DA-CLIP's" in printed
    assert read_image(tmp_path / "x_run" / "curves.png").std() > 5
    write_losses(tmp_path, {"perc": 0, "tv": 0})
    with pytest.raises(UserError, match=r"trained with the losses .* give the same --loss-config"):
        run_main(train_student, monkeypatch, *arguments)
    write_losses(tmp_path)
    assert run_main(train_student, monkeypatch, *arguments) == 0
    assert "Training complete after 1 epochs" in capsys.readouterr().out


def test_without_vgg_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "torchvision.models.VGG19_Weights.IMAGENET1K_V1.value.url", "http://127.0.0.1:9/vgg.pth", raising=False
    )
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def refuse(*arguments: Any, **keywords: Any) -> None:
        print("Downloading: as PyTorch says it on every rank", file=sys.stderr)
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    config, device = train_student.StudentConfig(), torch.device("cpu")
    for number in (0, 1):
        monkeypatch.setattr(train_student, "rank", lambda number=number: number)
        assert train_student.perceptual_features(config, dict(WEIGHTS), device) is None
    printed = capsys.readouterr()
    assert printed.out.startswith('Downloading: "http')
    assert printed.out.count("Downloading") == 1
    lines = printed.err.splitlines()
    assert len(lines) == 1
    assert "VGG19's weights: no network; training without the perceptual loss (perc)" in lines[0]
    with pytest.raises(UserError, match="--vgg-weights nowhere"):
        train_student.perceptual_features(train_student.StudentConfig(vgg_weights="nowhere"), dict(WEIGHTS), device)


def test_evaluation_compares_with_input_and_classic(
    two_ranks: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments_of(data, tmp_path / "unused.pt")[2:8]  # the test sets and the labels
    arguments = ["--model", two_ranks / "whole.pt", *flags, "--img-size", SIZE_PX, "--output", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
    evaluate.main()
    printed = capsys.readouterr().out
    assert "white balance + CLAHE" in printed
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    record = json.loads(
        [line for line in (two_ranks / "whole_run" / "metrics.jsonl").read_text().splitlines() if '"epoch"' in line][-1]
    )
    assert results["student"]["val_psnr"] == pytest.approx(record["val_psnr"], abs=1e-6)
    assert read_image(tmp_path / "out" / f"{SET}.jpg").shape == (4 * SIZE_PX, 3 * SIZE_PX, 3)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--model", str(tmp_path / "no.pt")])
    with pytest.raises(UserError, match=r"no\.pt: no such file; training writes it to --save-path"):
        evaluate.main()


def test_a_white_balance_makes_a_cast_grey() -> None:
    cast = np.full((32, 32, 3), (60, 160, 110), np.uint8)
    assert evaluate.classical(cast).std(2).max() < 3


def test_summaries_are_means_over_each_set(data: Path) -> None:
    labels = data / "pseudo-labels" / "daclip"
    entries = benchmark_entries(data / "Dataset" / "testset(ref)", labels / "testset_ref", True)
    entries += benchmark_entries(data / "Dataset" / "testset(non-ref)", labels / "testset_nonref", False)
    dataset = RestorationDataset(entries, SIZE_PX, (10, 20, 10, 0))
    summary = summarise(dataset, np.arange(12.0).reshape(6, 2))
    assert summary[f"psnr/{SET}"] == summary["val_psnr"] == 2
    assert summary[f"ssim/{SET}"] == 3
    assert summary[f"uciqe/{UNPAIRED}"] == summary["val_uciqe"] == 9
    task = Restoration(StudentLoss(WEIGHTS), dataset, 20, Path("x.pt"))
    record = {**summary, "epoch": 1, "train_loss": 0.12341, "psnr/simulated": 23.451, "ssim/simulated": 0.87652}
    assert task.epoch_lines(record, "val_psnr", True)[:2] == [
        "Epoch 1/20 - Train loss: 0.1234",
        "[Ref] simulated: PSNR=23.45 dB, SSIM=0.8765",
    ]


def run_restore(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["restore.py", *map(str, arguments)])
    restore.main()


def test_a_folder_is_restored_and_bad_files_are_left_out(
    two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "dive"
    make_data.write_png(source / "deep" / "a.png", photograph(1, 37, 90))
    (source / "b.jpg").write_bytes(b"no picture")
    weights = two_ranks / "whole.pt"
    run_restore(
        monkeypatch,
        "--model",
        weights,
        "--source",
        source,
        "--output",
        tmp_path / "out",
        "--tile",
        "64",
        "--overlap",
        "16",
    )
    printed = capsys.readouterr()
    assert read_image(tmp_path / "out" / "deep" / "a.png.jpg").shape == (37, 90, 3)
    assert "1 of 2 pictures restored" in printed.out
    assert len(printed.err.splitlines()) == 1
    assert "b.jpg" in printed.err
    for bad, reason in ((source / "b.jpg", "no readable picture"), (tmp_path / "nowhere", "no readable picture")):
        with pytest.raises(UserError, match=reason):
            run_restore(monkeypatch, "--model", weights, "--source", bad)
    with pytest.raises(UserError, match="not a file of weights"):
        run_restore(monkeypatch, "--model", source / "b.jpg", "--source", source)


def test_tiles_cover_a_picture_without_seams() -> None:
    assert restore.spans(100, 64, 16) == [(0, 64), (36, 100)]
    assert restore.spans(64, 64, 16) == [(0, 64)]
    for length in (65, 129, 1000):
        spans = restore.spans(length, 64, 16)
        assert (spans[0][0], spans[-1][1]) == (0, length)
        assert all(one[1] - other[0] >= 16 for one, other in itertools.pairwise(spans))
    network = student()
    torch.nn.init.zeros_(network.head.weight)  # returns its input: so must the blend of its tiles
    image = photograph(5, 150, 131)
    label = restore.label_from(restore.describe(image))
    assert np.array_equal(restore.restore(network.eval(), image, label, torch.device("cpu"), 64, 16), image)


def test_labels_are_exported_for_every_set(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = arguments_of(data, tmp_path / "unused.pt")[:6]
    monkeypatch.setattr(sys, "argv", ["export_pseudo_labels.py", *flags, "--pseudo-root", str(tmp_path / "labels")])
    export_pseudo_labels.main()
    made = data / "pseudo-labels" / "daclip"
    files = sorted(path.relative_to(made) for path in made.rglob("*.pt"))
    assert files == sorted(path.relative_to(tmp_path / "labels") for path in (tmp_path / "labels").rglob("*.pt"))
    first, second = (torch.load(folder / files[0], weights_only=True) for folder in (made, tmp_path / "labels"))
    assert torch.equal(first["masks"], second["masks"])
    monkeypatch.setattr(sys, "argv", ["export_pseudo_labels.py", "--train-root", str(tmp_path / "nowhere")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no pictures below"):
        export_pseudo_labels.main()


def test_making_data_refuses_what_it_would_overwrite(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output", str(data)])
    with pytest.raises(UserError, match="exists; remove it, or choose another --output"):
        make_data.main()
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--images", str(data / "nowhere"), "--output", str(data / "new")])
    with pytest.raises(UserError, match="0 pictures; at least 2 are needed"):
        make_data.main()
