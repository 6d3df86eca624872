"""The training command on two ranks: equal to one rank, resumable after a kill, launched as the
guide says.
"""

import importlib
import itertools
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from underwater_ir.commands import (
    evaluate,
    export_pseudo_labels,
    make_data,
    restore,
)
from underwater_ir.data.datasets import (
    RestorationDataset,
    benchmark_entries,
    create_evaluation_loader,
)
from underwater_ir.data.pseudo_labels import PROMPTS, read_label
from underwater_ir.filters import clahe
from underwater_ir.student import train_student
from underwater_ir.student.losses import WEIGHTS, StudentLoss
from underwater_ir.student.network import Curves
from underwater_ir.student.restoration import METRICS, Restoration, measure, summarise

from recipes.underwater_ir.tests.small import (
    SIZE_PX,
    WIDTH,
    batch,
    photograph,
    student,
    write_losses,
    write_photographs,
)
from tests.support.plugin import free_port, run_script
from tests.support.ranks import RankFailed, run_ranks
from tests.support.recipes import (
    RANK_NAMES,
    RECIPES,
    assert_equal,
    assert_equal_moments,
    assert_refused,
    dying,
    run_command,
)
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.engine import stopping
from yolo_seg_ddp.run.records import RunState, read_epochs
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.distributed.ddp import wrap_for_ranks
from yolo_seg_ddp.utils.errors import UsageError

SCRIPT = RECIPES / "underwater_ir" / "train_ddp.sh"
KILL_AT = 4  # the second batch of the second epoch
SET, UNPAIRED = "simulated", "simulated-unpaired"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a data set of 15 training pairs by the recipe's own command."""
    folder = tmp_path_factory.mktemp("data")
    write_photographs(folder / "photographs", 3)
    counts = ("--num-train", "15", "--num-test", "3", "--size", "24")
    run_command(make_data, "--images", folder / "photographs", "--output", folder, *counts)
    write_losses(folder)
    return folder


def roots_of(data: Path) -> dict[str, str]:
    """Return the four folders of a data set by the launcher's variables, which are the trainer's
    flags, too.
    """
    sets = {"VAL_REF_ROOT": "Dataset/testset(ref)", "VAL_NONREF_ROOT": "Dataset/testset(non-ref)"}
    places = {"TRAIN_ROOT": "Dataset/train", **sets, "PSEUDO_ROOT": "pseudo-labels/daclip"}
    return {name: str(data / place) for name, place in places.items()}


def arguments_of(data: Path, save_path: Path) -> list[str]:
    roots = [(f"--{name.lower().replace('_', '-')}", root) for name, root in roots_of(data).items()]
    return [
        *itertools.chain.from_iterable(roots),
        *(
            "--epochs",
            "2",
            "--batch-size",
            "4",
            "--img-size",
            str(SIZE_PX),
            "--width",
            str(WIDTH),
            "--device",
            "cpu",
        ),
        *(
            "--loss-config",
            str(data / "losses.json"),
            "--lr",
            "1e-3",
            "--num-workers",
            "0",
            "--no-recompute",
        ),
        *("--save-path", str(save_path)),
    ]


def train(data: Path, save_path: Path, kill_at: int = 0) -> int:
    """Run the training command on this rank; on rank 1 kill the process at training batch number
    `kill_at`.
    """
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # outlives one training
    stopping.STOP_CHECK_STEPS = 1
    train_student.SAVE_EVERY_S = 0
    # takes seconds; a test of one process has the picture
    train_student.draw_curves = lambda run_folder: None
    sys.argv = ["train_student", "--ddp", *arguments_of(data, save_path)]
    with dying(StudentLoss, "__call__", kill_at if os.environ["RANK"] == "1" else 0):
        return train_student.main()


def gradients_of_share(share: slice) -> tuple[float, list[np.ndarray]]:
    """Return the reported loss and the gradients after one batch of five pictures, of which this
    rank has `share`.
    """
    network, samples = (
        student(text_dim=6),
        {name: part[share] for name, part in batch(5, text_dim=6).items()},
    )
    wrapped = (
        wrap_for_ranks(network, torch.device("cpu"), 0)
        if torch.distributed.is_initialized()
        else network
    )
    loss, values = StudentLoss(WEIGHTS)(wrapped(samples), samples)
    loss.backward()
    gradients = [weight.grad for weight in network.parameters()]
    return float(values["loss"]), [
        gradient.numpy() for gradient in gradients if gradient is not None
    ]


def benchmarks_of(data: Path, number: int = 6) -> RestorationDataset:
    labels = data / "pseudo-labels" / "daclip"
    entries = benchmark_entries(data / "Dataset" / "testset(ref)", labels / "testset_ref", True)
    entries += benchmark_entries(
        data / "Dataset" / "testset(non-ref)", labels / "testset_nonref", False
    )
    return RestorationDataset(entries[:number], SIZE_PX, (10, 20, 10, 0))


def measured(data: Path) -> np.ndarray:
    dataset = benchmarks_of(data, 5)
    with torch.no_grad():
        return measure(
            student(), dataset, create_evaluation_loader(dataset, 2), torch.device("cpu")
        )


def compare_then_die(data: Path, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    loss, gradients = gradients_of_share(slice(0, 3) if rank == 0 else slice(3, 5))
    np.savez(folder / f"rank{rank}.npz", *gradients, loss=loss, measured=measured(data))
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
        # rounding of the phases of small amplitudes: up to 2e-5
        assert max(gaps) <= 1e-4, (number, gaps)
    assert any(float(np.abs(gradient).max()) > 0.01 for gradient in expected)
    assert (3 * saved[0]["loss"] + 2 * saved[1]["loss"]) / 5 == pytest.approx(loss, rel=1e-5)


def test_the_metrics_of_two_ranks_are_those_of_one(two_ranks: Path, data: Path) -> None:
    expected = measured(data)
    assert np.isfinite(expected[:3]).all()
    assert np.isfinite(expected[:, 2:]).all()
    for rank in (0, 1):
        assert np.load(two_ranks / f"rank{rank}.npz")["measured"] == pytest.approx(
            expected, abs=1e-6, nan_ok=True
        )


def test_a_killed_rank_costs_nothing_after_a_resume(two_ranks: Path) -> None:
    whole, killed = (
        torch.load(two_ranks / f"{name}.pt", weights_only=True) for name in ("whole", "killed")
    )
    assert_equal(whole, killed)
    assert not any(name.startswith("module.") for name in whole)
    states = [
        sorted((two_ranks / f"{name}_run" / "checkpoint").iterdir())[-1]
        for name in ("whole", "killed")
    ]
    saved = [torch.load(state / "state.pt", weights_only=True) for state in states]
    # 2 epochs of 2
    assert saved[0]["progress"]["global_step"] == saved[1]["progress"]["global_step"] == 4
    assert_equal_moments(saved[0]["optimizer"], saved[1]["optimizer"])
    steps = [record["global_step"] for record in RunState(two_ranks / "killed_run").read().batches]
    assert len(steps) == len(set(steps))


def test_the_guides_launch_prints_the_guides_lines(data: Path, tmp_path: Path) -> None:
    save_path = tmp_path / "experiments" / "x.pt"
    extra = ("--no-recompute", "--width", str(WIDTH), "--loss-config", str(write_losses(tmp_path)))
    environment: Any = {
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "SAVE_PATH": str(save_path),
        **roots_of(data),
    }
    done = run_script("bash", SCRIPT, "2", "4", "1", str(SIZE_PX), "--", *extra, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "✅ DDP enabled: training on 2 CPU processes" in lines
    assert "15 training pictures, total batch 2 x 4 = 8" in done.stdout
    for start in (
        "Epoch 1/1 - Train loss: ",
        f"[Ref] {SET}: PSNR=",
        f"[Non-Ref] {UNPAIRED}: UIQM=",
    ):
        assert len([line for line in lines if line.startswith(start)]) == 1, start
    assert any(" dB, SSIM=0." in line for line in lines)
    assert torch.load(save_path, weights_only=True).keys() == student().state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (
            "2",
            {"TRAIN_ROOT": "nowhere"},
            "nowhere has no folders input and target; python make_data.py",
        ),
        ("2 4 x", {}, "`x` is not a whole number above 0"),
        ("2 4 1 16 --width", {}, "unexpected `--width`: trainer options stand after --"),
        ("2", {"MASTER_PORT": "many"}, "MASTER_PORT=many is not a port"),
    ],
)
def test_the_script_refuses_in_one_line(
    arguments: str, environment: dict[str, Any], reason: str
) -> None:
    fake: dict[str, Any] = {"PYTHON": "echo"}  # nothing is started before the check
    done = run_script("bash", SCRIPT, *arguments.split(), timeout_s=60, **{**fake, **environment})
    assert done.returncode in (1, 2)
    assert reason in done.stderr
    assert done.stdout.count("\n") == 0


def test_a_port_that_was_chosen_and_is_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = run_script("bash", SCRIPT, MASTER_PORT=str(port))
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == f"train_ddp.sh: MASTER_PORT={port} is in use; unset it or choose another\n"
    )


def test_defaults_are_the_guides_and_both_spellings_work() -> None:
    arguments = train_student.with_hyphens(
        ["--local_rank=1", "--world_size", "2", "--save-path", "my_file.pt", "--ddp"]
    )
    config = parse_config(train_student.StudentConfig, "", arguments)
    assert (config.local_rank, config.world_size, config.save_path, config.ddp) == (
        1,
        2,
        "my_file.pt",
        True,
    )
    assert (config.epochs, config.batch_size, config.img_size, config.lr, config.width) == (
        10,
        4,
        256,
        1e-4,
        64,
    )
    assert config.save_dir == "my_file_run"


def test_flags_make_a_rank_where_no_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    )
    config = train_student.StudentConfig(ddp=True, local_rank=1)
    with assert_refused("--local-rank 1: must be below --world-size, 1", kind=UsageError):
        train_student.find_ranks(config)
    found = train_student.find_ranks(
        train_student.StudentConfig(ddp=True, local_rank=1, world_size=2)
    )
    assert (found.rank, found.local_rank, found.world_size) == (1, 1, 2)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "12355")
    again = train_student.find_ranks(train_student.StudentConfig(ddp=True, local_rank=0))
    assert again.rank == 1  # the environment wins
    with assert_refused("2 processes without --ddp: add --ddp", kind=UsageError):
        train_student.find_ranks(train_student.StudentConfig())


def test_other_losses_are_refused_at_a_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *arguments_of(data, tmp_path / "x.pt"),
        "--epochs",
        "1",
        "--loss-config",
        str(write_losses(tmp_path)),
    ]
    assert run_command(train_student, *arguments) == 0
    printed = capsys.readouterr().out
    assert "Epoch 1/1 - Train loss: " in printed
    assert "Pseudo-labels: colour scores, not DA-CLIP's" in printed
    assert read_image(tmp_path / "x_run" / "curves.png").std() > 5
    write_losses(tmp_path, {"perc": 0, "tv": 0})
    with assert_refused("trained with the losses", "give the same --loss-config"):
        run_command(train_student, *arguments)
    write_losses(tmp_path)
    assert run_command(train_student, *arguments) == 0
    assert "Training complete after 1 epoch:" in capsys.readouterr().out


def without_width(arguments: list[str]) -> list[str]:
    """Return a command line for --weights, which have a width."""
    place = arguments.index("--width")
    return arguments[:place] + arguments[place + 2 :]


def test_folds_of_real_pairs_are_trained_after_the_simulation_and_judged_on_what_they_left_out(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # takes seconds; another test has the picture
    monkeypatch.setattr(train_student, "draw_curves", lambda run_folder: None)
    flags = ["--network", "curves", "--epochs", "1"]
    simulated = tmp_path / "simulated.pt"
    run_command(train_student, *arguments_of(data, simulated), *flags)
    models = [tmp_path / f"{fold}.pt" for fold in (1, 2)]
    for fold, model in enumerate(models, 1):
        arguments = without_width(arguments_of(data, model))
        of_fold = ("--epochs", 1, "--weights", simulated, "--folds", 2, "--fold", fold)
        run_command(train_student, *arguments, *of_fold)
    printed = capsys.readouterr().out
    assert "15 training pictures" in printed
    assert "8 training pictures" in printed
    assert "[Ref] held-out: PSNR=" in printed
    # the average moves from the simulation's weights
    before, after = (torch.load(file, weights_only=True) for file in (simulated, models[0]))
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) < 0.02
    places = [*arguments_of(data, tmp_path / "unused.pt")[:8], "--folds", "2"]
    sizes = ("--img-size", SIZE_PX, "--output", tmp_path / "out")
    run_command(evaluate, "--model", *models, *places, *sizes)
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    records = [read_epochs(tmp_path / f"{fold}_run")[-1] for fold in (1, 2)]
    psnr = [record["psnr/held-out"] for record in records]
    student_of = results["student"]["sets"]
    assert student_of["[Ref] held-out"]["psnr"] == pytest.approx((8 * psnr[0] + 7 * psnr[1]) / 15)
    assert psnr[0] != pytest.approx(psnr[1], abs=1e-3)
    others = [record[f"psnr/{SET}"] for record in records]
    assert student_of[f"[Ref] {SET}"]["psnr"] == pytest.approx(np.mean(others))
    assert results["student + CLAHE"]["sets"][f"[Ref] {SET}"]["psnr"] != pytest.approx(
        student_of[f"[Ref] {SET}"]["psnr"], abs=1e-3
    )
    with assert_refused("--folds 2: 1 models are not 2 for each seed"):
        run_command(evaluate, "--model", models[0], *places)
    other = tmp_path / "other.pt"
    arguments = without_width(arguments_of(data, other))
    with assert_refused("--fold 3: above --folds 2", kind=UsageError):
        run_command(train_student, *arguments, "--folds", 2, "--fold", 3)
    torch.save(Curves(WIDTH, 9, 20, 10).state_dict(), other)
    with assert_refused(f"--weights {other}: learned from labels of another shape"):
        run_command(train_student, *arguments, "--weights", other)


def test_curves_see_the_whole_picture_and_clahe_is_mixed_in(tmp_path: Path) -> None:
    network = student(kind=Curves).eval()
    torch.save(network.state_dict(), tmp_path / "x.pt")
    image = photograph(5, 70, 150)
    make_data.write_png(tmp_path / "dive" / "a.png", image)
    restored = {}
    for tile, share in ((64, 0.0), (1024, 0.0), (1024, 0.5)):
        output = tmp_path / f"out-{tile}-{share}"
        flags = ("--source", tmp_path / "dive", "--output", output, "--tile", tile)
        run_command(
            restore, "--model", tmp_path / "x.pt", *flags, "--overlap", 16, "--clahe", str(share)
        )
        restored[tile, share] = read_image(output / "a.png.jpg").astype(int)
    assert np.array_equal(restored[64, 0.0], restored[1024, 0.0])
    assert np.abs(restored[1024, 0.5] - restored[1024, 0.0]).mean() > 1
    assert np.array_equal(clahe(image, 0.0), image)
    half = (clahe(image).astype(int) + image) / 2
    assert np.abs(clahe(image, 0.5) - half).max() <= 0.5


class TinyCLIP(torch.nn.Module):
    """What `score_with_clip.py` uses of OpenCLIP: the tokens are the means of four quarters."""

    def __init__(self) -> None:
        super().__init__()
        visual: Any = torch.nn.Module()
        visual.proj = torch.nn.Parameter(torch.eye(3))
        visual.grid_size, visual.forward = (2, 2), self.look
        self.visual = visual
        self.words = torch.nn.Embedding(len(PROMPTS), 3)

    def look(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.visual.output_tokens
        tokens = torch.nn.functional.adaptive_avg_pool2d(image, 2).flatten(2).transpose(1, 2)
        return tokens.mean(1), tokens

    def encode_text(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words)


def test_a_clip_model_scores_the_places_of_each_picture(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A small stand-in has OpenCLIP's names; of DA-CLIP's weights the controller is used."""
    torch.manual_seed(0)
    example = importlib.import_module("score_with_clip")
    # its folders are the defaults, below the working folder
    monkeypatch.chdir(data)
    network = TinyCLIP()
    module: Any = ModuleType("open_clip")
    module.create_model_and_transforms = lambda name: (
        TinyCLIP(),
        None,
        lambda image: tensor_of_image(np.asarray(image)),
    )
    module.get_tokenizer = lambda name: lambda prompts: torch.arange(len(prompts))
    monkeypatch.setitem(sys.modules, "open_clip", module)
    plain = network.state_dict()
    controlled = {f"module.clip.{name}": value for name, value in plain.items()} | {
        "module.visual_control.proj": plain["visual.proj"][[1, 2, 0]],
        "module.visual_control.transformer.zero_modules.0.weight": torch.zeros(2),
    }
    torch.save(plain, tmp_path / "plain.pt")
    torch.save({"epoch": 50, "state_dict": controlled}, tmp_path / "controlled.pt")
    flags = arguments_of(data, tmp_path / "unused.pt")[:6]
    name = sorted((data / "Dataset/train/input").iterdir())[0].name
    picture = tensor_of_image(read_image(data / "Dataset/train/input" / name))
    tokens = torch.nn.functional.adaptive_avg_pool2d(picture, 2).flatten(1)  # (3, 4)
    for kind, order in (("plain", [0, 1, 2]), ("controlled", [2, 0, 1])):
        file = tmp_path / f"{kind}.jsonl"
        capsys.readouterr()
        run_command(example, tmp_path / f"{kind}.pt")
        file.write_text(capsys.readouterr().out)
        run_command(
            export_pseudo_labels, *flags, "--scores", file, "--pseudo-root", tmp_path / kind
        )
        label = read_label((tmp_path / kind / "train" / name).with_suffix(".pt"))
        assert (label.source, label.masks.shape) == (kind, (len(PROMPTS), 2, 2))
        cosine = torch.cosine_similarity(plain["words.weight"][:, :, None], tokens[order][None])
        expected = (5 * cosine).sigmoid().flatten().tolist()
        assert label.masks.flatten().tolist() == pytest.approx(expected, abs=1e-3)
    torch.save({"words.weight": torch.zeros(2, 3)}, tmp_path / "plain.pt")
    with assert_refused("plain.pt: not weights of ViT-L-14"):
        run_command(example, tmp_path / "plain.pt", "ViT-L-14")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with assert_refused("OpenCLIP is missing: pip install open_clip_torch"):
        run_command(example, tmp_path / "plain.pt")
    with assert_refused("usage: python score_with_clip.py WEIGHTS", kind=UsageError):
        run_command(example)


def tensor_of_image(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)


def test_without_vgg_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "torchvision.models.VGG19_Weights.IMAGENET1K_V1.value.url"
    monkeypatch.setattr(url, "http://127.0.0.1:9/vgg.pth", raising=False)
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
    with assert_refused("--vgg-weights nowhere"):
        train_student.perceptual_features(
            train_student.StudentConfig(vgg_weights="nowhere"), dict(WEIGHTS), device
        )


def test_evaluation_compares_with_input_and_classic(
    two_ranks: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments_of(data, tmp_path / "unused.pt")[2:8]  # the test sets and the labels
    sizes = ("--img-size", SIZE_PX, "--output", tmp_path / "out")
    run_command(evaluate, "--model", two_ranks / "whole.pt", *flags, *sizes)
    assert "grey world + CLAHE" in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "metrics.json").read_text())
    record = read_epochs(two_ranks / "whole_run")[-1]
    assert results["student"]["val_psnr"] == pytest.approx(record["val_psnr"], abs=1e-6)
    assert read_image(tmp_path / "out" / f"{SET}.jpg").shape == (4 * SIZE_PX, 3 * SIZE_PX, 3)
    cast = np.full((32, 32, 3), (60, 160, 110), np.uint8)
    assert evaluate.grey_world(cast).std(2).max() < 1
    assert list(results["CLAHE"]["sets"][f"[Ref] {SET}"]) == list(METRICS)
    assert list(results["student"]["sets"][f"[Non-Ref] {UNPAIRED}"]) == list(METRICS[2:])
    weights = torch.load(two_ranks / "whole.pt", weights_only=True)
    torch.save(
        {name: weight + 0.1 * name.startswith("head") for name, weight in weights.items()},
        tmp_path / "other.pt",
    )
    run_command(evaluate, "--model", two_ranks / "whole.pt", tmp_path / "other.pt", *flags, *sizes)
    both = json.loads((tmp_path / "out" / "metrics.json").read_text())["student"]
    psnr, spread = both["sets"][f"[Ref] {SET}"]["psnr"], both["spread"][f"[Ref] {SET}"]["psnr"]
    first = results["student"]["sets"][f"[Ref] {SET}"]["psnr"]
    # of two values: their distance / sqrt(2)
    assert spread == pytest.approx(abs(psnr - first) * 2**0.5, rel=1e-6)
    assert f"{psnr:.3f} ± {spread:.3f}" in capsys.readouterr().out


def test_summaries_are_means_over_each_set(data: Path) -> None:
    dataset = benchmarks_of(data)
    summary = summarise(dataset, np.arange(36.0).reshape(6, 6))
    assert summary[f"psnr/{SET}"] == summary["val_psnr"] == 6
    assert summary[f"ssim/{SET}"] == 7
    assert summary[f"uciqe/{UNPAIRED}"] == summary["val_uciqe"] == 27
    task = Restoration(StudentLoss(WEIGHTS), dataset, 20, Path("x.pt"))
    record = {
        **summary,
        "epoch": 1,
        "train_loss": 0.12341,
        "psnr/simulated": 23.451,
        "ssim/simulated": 0.87652,
    }
    assert task.epoch_lines(record, "val_psnr", True)[:2] == [
        "Epoch 1/20 - Train loss: 0.1234",
        "[Ref] simulated: PSNR=23.45 dB, SSIM=0.8765",
    ]


def test_a_folder_is_restored_and_bad_files_are_left_out(
    two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, weights = tmp_path / "dive", ("--model", two_ranks / "whole.pt")
    make_data.write_png(source / "deep" / "a.png", photograph(1, 37, 90))
    (source / "b.jpg").write_bytes(b"no picture")
    tiles = ("--tile", "64", "--overlap", "16")
    run_command(restore, *weights, "--source", source, "--output", tmp_path / "out", *tiles)
    printed = capsys.readouterr()
    assert read_image(tmp_path / "out" / "deep" / "a.png.jpg").shape == (37, 90, 3)
    assert "1 of 2 pictures restored" in printed.out
    assert len(printed.err.splitlines()) == 1
    assert "b.jpg" in printed.err


@pytest.mark.parametrize(
    ("command", "arguments", "reason"),
    [
        (evaluate, ("--model", "no.pt"), "no.pt: no such file; training writes it to --save-path"),
        (restore, ("--model", "{two}/whole.pt", "--source", "bad.jpg"), "no readable picture"),
        (restore, ("--model", "{two}/whole.pt", "--source", "nowhere"), "no readable picture"),
        (restore, ("--model", "bad.jpg", "--source", "."), "not a file of weights"),
        (export_pseudo_labels, ("--train-root", "nowhere"), "no pictures below"),
        (make_data, ("--output", "{data}"), "exists; remove it, or choose another --output"),
        (
            make_data,
            ("--images", "nowhere", "--output", "new"),
            "0 pictures; at least 2 are needed",
        ),
    ],
)
def test_a_command_refuses_in_one_line(
    command: ModuleType,
    arguments: tuple[str, ...],
    reason: str,
    two_ranks: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jpg").write_bytes(b"no picture")
    with assert_refused(reason):
        run_command(command, *(argument.format(two=two_ranks, data=data) for argument in arguments))


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
    assert np.array_equal(
        restore.restore(network.eval(), image, label, torch.device("cpu"), 64, 16), image
    )


def test_labels_are_exported_for_every_set(data: Path, tmp_path: Path) -> None:
    flags = arguments_of(data, tmp_path / "unused.pt")[:6]
    run_command(export_pseudo_labels, *flags, "--pseudo-root", tmp_path / "labels")
    made = data / "pseudo-labels" / "daclip"
    folders = (made, tmp_path / "labels")
    files, again = (
        sorted(path.relative_to(folder) for path in folder.rglob("*.pt")) for folder in folders
    )
    assert files == again
    first, second = (torch.load(folder / files[0], weights_only=True) for folder in folders)
    assert torch.equal(first["masks"], second["masks"])
