"""Train the underwater restoration student, on one process or many.

    python -m underwater_ir.student.train_student \\
        --train-root Dataset/train --pseudo-root pseudo-labels/daclip
    bash train_ddp.sh 4 8

The same command again continues an interrupted training. `--help` lists every option with its
default.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from underwater_ir.data.datasets import (
    Entry,
    RestorationDataset,
    benchmark_entries,
    create_evaluation_loader,
    create_paired_train_loader,
    shares_by_scene,
    train_entries,
)
from underwater_ir.data.pseudo_labels import read_label
from underwater_ir.student.losses import StudentLoss, load_vgg, read_weights
from underwater_ir.student.network import (
    CROSS_HEADS,
    SIZE_MULTIPLE,
    Curves,
    Network,
    Student,
    read_student,
)
from underwater_ir.student.restoration import Restoration, draw_curves
from yolo_seg_ddp.data.loader import EpochBatches
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import choose_device, seed_everything, tune_device
from yolo_seg_ddp.utils.distributed import (
    RankInfo,
    cleanup_ddp,
    main_printer,
    rank,
    read_rank_environment,
    setup_ddp,
    world_size,
)
from yolo_seg_ddp.utils.errors import (
    UsageError,
    UserError,
    explain_out_of_memory,
    print_warning,
    run_script,
)
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.text import counted

DEFAULT_ADDRESS, DEFAULT_PORT = "localhost", "12355"  # the guide's
GRADIENT_NORM = 1.0
SAVE_EVERY_S = 300.0
# of the moving average of `Curves`, which sees a few hundred steps
CURVES_DECAY, CURVES_RAMP = 0.99, 100.0


@dataclass(frozen=True)
class StudentConfig(Options):
    """The guide's flags, then those that the guide does not have."""

    train_root: str = option(
        "Dataset/train", "training pairs: a folder with input and target", metavar="DIR"
    )
    val_ref_root: str = option(
        "Dataset/testset(ref)", "test sets with targets: SET/input, SET/target", metavar="DIR"
    )
    val_nonref_root: str = option(
        "Dataset/testset(non-ref)", "test sets without targets: SET", metavar="DIR"
    )
    pseudo_root: str = option(
        "pseudo-labels/daclip",
        "labels: train, testset_ref/SET, testset_nonref/SET",
        metavar="DIR",
        wants="not pseudo_train_root or not pseudo_val_ref_root or not pseudo_val_nonref_root",
    )
    epochs: int = option(10, "passes over the training pictures", at_least=1, may_differ=True)
    batch_size: int = option(4, "pictures per GPU (per process) and step", at_least=1)
    num_workers: int = option(
        4, "most loader processes per GPU; fewer where cores are few", at_least=0, may_differ=True
    )
    img_size: int = option(
        256, "side of the pictures in pixels", at_least=16, multiple_of=SIZE_MULTIPLE
    )
    save_path: str = option(
        "student_model.pt", "file for the weights, written after each epoch", metavar="FILE"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N", may_differ=True)
    ddp: bool = option(False, "train together with the launcher's other processes", may_differ=True)
    local_rank: int = option(
        0, "this process's number; LOCAL_RANK comes first", at_least=0, may_differ=True, wants="ddp"
    )
    world_size: int = option(
        1, "number of processes; WORLD_SIZE comes first", at_least=1, wants="ddp"
    )
    backend: str = option(
        "auto",
        "auto: NCCL on GPUs, else gloo",
        choices=("auto", "nccl", "gloo"),
        may_differ=True,
        wants="ddp",
    )
    pseudo_train_root: str | None = option(None, "labels of the training pictures", metavar="DIR")
    pseudo_val_ref_root: str | None = option(
        None, "labels of the test sets with targets", metavar="DIR"
    )
    pseudo_val_nonref_root: str | None = option(
        None, "labels of the test sets without targets", metavar="DIR"
    )
    lr: float = option(1e-4, "learning rate of Adam", above=0)
    eval_batch_size: int = option(
        1, "pictures per process in the evaluation", at_least=1, may_differ=True
    )
    loss_config: str | None = option(
        None, 'JSON file of loss weights, such as {"perc": 0}', metavar="FILE"
    )
    vgg_weights: str | None = option(
        None, "torchvision's VGG19 weights; unset: downloaded", metavar="FILE", may_differ=True
    )
    num_degradations: int | None = option(
        None, "kinds of degradation that the labels must have", at_least=1
    )
    network: str = option(
        "wavelets",
        "curves: one colour curve for each picture, for some 50 to some 1,000 real pairs",
        choices=("wavelets", "curves"),
        needs="not weights",
    )
    weights: str | None = option(
        None, "begin with these weights, such as those of simulated water", metavar="FILE"
    )
    folds: int | None = option(
        None, "leave one of so many shares of the scenes out, and evaluate it", at_least=2
    )
    fold: int = option(1, "number of the share that is left out", at_least=1, needs="folds")
    width: int = option(
        64,
        "channels of the first level",
        at_least=CROSS_HEADS,
        multiple_of=CROSS_HEADS,
        needs="not weights",
    )
    recompute: bool = option(True, "a fifth of the memory: compute the inside of each block twice")
    augment: bool = option(True, "crop, mirror and turn the training pictures")
    seed: int = option(0, "seed of weights, order and augmentation", at_least=0)
    config: str | None = option(
        None, "YAML file with any of these options", metavar="FILE", may_differ=True
    )

    @property
    def save_dir(self) -> str:
        """The run's folder: what a resume needs, and metrics."""
        return str(Path(self.save_path).with_suffix("")) + "_run"

    @property
    def resume(self) -> None:
        """An interrupted training is continued by the same command."""


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(
        StudentConfig, "Train the underwater restoration student", with_hyphens(sys.argv[1:])
    )
    ranks = find_ranks(config)
    config = replace(config, world_size=ranks.world_size)
    die_with_parent()
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(
        ranks.local_world_size, config.num_workers, device.type
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    seed_everything(config.seed)
    tune_device(device, deterministic=False, fixed_shapes=True)
    weights = read_weights(config.loss_config)
    train_set, benchmarks = open_datasets(config, print if ranks.is_main else lambda line: None)
    shape = train_set.label_shape
    network: Network
    if config.weights is not None:
        network = read_student(Path(config.weights), "--weights ")
        if network.label_shape != shape:
            raise UserError(f"--weights {config.weights}: learned from labels of another shape")
    elif config.network == "curves":
        network = Curves(config.width, *shape)
    else:
        network = Student(config.width, *shape)
    network.recompute = config.recompute
    too_large = (
        f"GPU {device.index}: --batch-size {config.batch_size} at {config.img_size} pixels does "
        "not fit its memory; "
        f"lower --batch-size or --img-size; --recompute needs the least"
    )
    with explain_out_of_memory(too_large):
        join(config, ranks, device)
        with OwnedRun(config) as run:
            say = main_printer(rank())
            say("\n".join([*run.notes, *heading(config, device, train_set, network)]))
            code = train(config, run, device, network, (train_set, benchmarks), weights, workers)
    cleanup_ddp()  # not after an error: NCCL would wait for ranks that have not failed
    return code


def with_hyphens(arguments: list[str]) -> list[str]:
    """Return a command line in which option names have hyphens: launchers of different age pass
    --local_rank or --local-rank.
    """
    return [
        "=".join([name.replace("_", "-"), *value])
        if name.startswith("--")
        else "=".join([name, *value])
        for name, *value in (argument.split("=", 1) for argument in arguments)
    ]


def find_ranks(config: StudentConfig) -> RankInfo:
    """Return this process's place, from the launcher's variables, else from --local-rank and
    --world-size.

    Raises UsageError for several processes without --ddp: each would train alone and overwrite the
    others' weights.
    """
    ranks = read_rank_environment()
    if not config.ddp:
        if ranks.world_size > 1:
            raise UsageError(
                f"{ranks.world_size} processes without --ddp: add --ddp, so that they train "
                "together"
            )
        return ranks
    os.environ.setdefault("MASTER_ADDR", DEFAULT_ADDRESS)
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)
    if "RANK" not in os.environ and config.local_rank >= config.world_size:
        raise UsageError(
            f"--local-rank {config.local_rank}: must be below --world-size, {config.world_size}"
        )
    if "RANK" not in os.environ and config.world_size > 1:
        place = {
            "RANK": config.local_rank,
            "LOCAL_RANK": config.local_rank,
            "WORLD_SIZE": config.world_size,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        return read_rank_environment()
    return ranks


def join(config: StudentConfig, ranks: RankInfo, device: torch.device) -> None:
    """Join the process group. Every rank must reach this."""
    if config.backend == "nccl" and device.type != "cuda":
        raise UsageError("--backend nccl needs GPUs; use --backend gloo, or auto")
    if config.backend == "gloo" and device.type == "cuda" and ranks.world_size > 1:
        distributed.join_process_group(ranks.rank, ranks.world_size, "gloo")
    setup_ddp(device, ranks)


def open_datasets(
    config: StudentConfig, say: object
) -> tuple[RestorationDataset, RestorationDataset]:
    """Return the training pictures and those of all test sets.

    Raises UserError for missing files.
    """
    labels = Path(config.pseudo_root)
    entries = train_entries(
        Path(config.train_root), Path(config.pseudo_train_root or labels / "train")
    )
    benchmarks: list[Entry] = []
    if config.folds is not None:
        if config.fold > config.folds:
            raise UsageError(f"--fold {config.fold}: above --folds {config.folds}")
        shares = shares_by_scene(entries, Path(config.train_root) / "input", config.folds)
        benchmarks = shares.pop(config.fold - 1)
        entries = [entry for share in shares for entry in share]
    for root, label_root, has_targets in (
        (config.val_ref_root, config.pseudo_val_ref_root or labels / "testset_ref", True),
        (config.val_nonref_root, config.pseudo_val_nonref_root or labels / "testset_nonref", False),
    ):
        found = benchmark_entries(Path(root), Path(label_root), has_targets)
        if not found and callable(say):
            say(f"{root}: no test set there; not evaluated")
        benchmarks += found
    shape = read_label(entries[0].label).shape
    if config.num_degradations not in (None, shape[2]):
        raise UserError(
            f"--num-degradations {config.num_degradations}: {entries[0].label} has {shape[2]} kinds"
        )
    return (
        RestorationDataset(
            entries, config.img_size, shape, augment=config.augment, seed=config.seed
        ),
        RestorationDataset(benchmarks, config.img_size, shape),
    )


def heading(
    config: StudentConfig, device: torch.device, train_set: RestorationDataset, network: nn.Module
) -> list[str]:
    """Return the lines before the first epoch."""
    count, million = world_size(), sum(weight.numel() for weight in network.parameters()) / 1e6
    kind = "GPUs" if device.type == "cuda" else "CPU processes"
    return [
        *([f"✅ DDP enabled: training on {count} {kind}"] if count > 1 else []),
        f"{len(train_set)} training pictures, total batch {count} x {config.batch_size} = "
        f"{count * config.batch_size}; "
        f"{million:.1f} million weights on {device}",
        f"Pseudo-labels: {read_label(train_set.entries[0].label).source}",
    ]


def perceptual_features(
    config: StudentConfig, weights: dict[str, float], device: torch.device
) -> nn.Module | None:
    """Return VGG19's features; None, with one line, when any rank cannot have them.

    Every rank must reach this.
    """
    if not weights["perc"]:
        return None
    features, problem = None, ""
    try:
        features = load_vgg(
            config.vgg_weights, Path(torch.hub.get_dir()) / "checkpoints", main_printer(rank())
        ).to(device)
    except UserError as error:
        problem = str(error)
    if distributed.any_rank(features is None):
        if config.vgg_weights is not None:
            raise UserError(
                f"--vgg-weights {config.vgg_weights}: {problem or 'not readable on another rank'}"
            )
        if rank() == 0:
            print_warning(
                f"{problem}; training without the perceptual loss (perc), see --vgg-weights"
            )
        return None
    return features


def train(
    config: StudentConfig,
    run: OwnedRun,
    device: torch.device,
    network: Network,
    datasets: tuple[RestorationDataset, RestorationDataset],
    weights: dict[str, float],
    workers: int,
) -> int:
    """Train in an open run folder, as a member of the process group; return the exit code."""
    train_set, benchmarks = datasets
    criterion = StudentLoss(weights, perceptual_features(config, weights, device))
    if run.resumes and run.choices.get("losses") != criterion.weights:
        raise UserError(
            f"{run.folder}: trained with the losses {run.choices.get('losses')}, now there are "
            f"{criterion.weights}; "
            f"give the same --loss-config and VGG weights, or another --save-path"
        )
    has_reference = any(entry.target is not None for entry in benchmarks.entries)
    options = EngineOptions(
        epochs=config.epochs,
        ema=isinstance(network, Curves),
        ema_decay=CURVES_DECAY,
        ema_ramp=CURVES_RAMP,
        patience=0,
        precision="off",  # spectra need fp32
        clip_norm=GRADIENT_NORM,
        monitor="val_psnr" if has_reference else "train_loss",
        higher_is_better=has_reference,
        save_every_s=SAVE_EVERY_S,
        tensorboard=False,
    )
    batches = EpochBatches(len(train_set), config.batch_size, rank(), world_size(), config.seed)
    pinned = device.type == "cuda"
    task = Restoration(criterion, benchmarks, config.epochs, Path(config.save_path))
    engine = TrainingEngine(
        network, device, options, task=task, run=run.folder, manifest={"losses": criterion.weights}
    )
    engine.train(
        create_paired_train_loader(train_set, config.batch_size, workers, batches, pinned),
        create_evaluation_loader(benchmarks, config.eval_batch_size, min(workers, 2), pinned),
        torch.optim.Adam(network.parameters(), lr=config.lr),
        resume=run.resumes,
    )
    if not engine.stopped_by:
        distributed.run_on_main(lambda: draw_curves(run.folder))
        main_printer(rank())(
            f"Training complete after {counted(engine.progress.epoch, 'epoch')}: {config.save_path}"
        )
    return run.conclude(
        engine.stopped_by, epoch=engine.progress.epoch, step=engine.progress.global_step
    )


if __name__ == "__main__":
    run_script(main)
