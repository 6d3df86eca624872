"""Train the Crowd-BT quality scorer on one GPU, many GPUs or the CPU.

    python make_data.py
    ./train_distributed.sh 4 --epochs 20 --batch-size 16
    torchrun --nproc_per_node=4 train.py --distributed --world-size 4 --epochs 20 --batch-size 16

The same command again continues an interrupted run. `--help` lists every option with its default.
"""

import math
import os
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]  # where the package crowd_bt is
import torch
from crowd_bt.comparisons import Comparisons, load_local, load_prepared, write_json
from crowd_bt.images import Pairs
from crowd_bt.loss import draw_log_of
from crowd_bt.metrics import annotator_table, evaluation, evaluation_lines
from crowd_bt.model import PairModel, build_scorer, read_checkpoint
from crowd_bt.options import BEST_MODEL, TrainConfig, adopt_launch_flags, read_options
from crowd_bt.s3_source import prepare_from_s3
from crowd_bt.scoring import image_loader, score_images
from crowd_bt.task import PairComparison, add_to_log

from yolo_seg_ddp.data.loader import EpochBatches, batch_bytes, get_dataloader, plan_loader
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import choose_device, seed_everything, tune_device
from yolo_seg_ddp.utils.distributed import RankInfo, Say, cleanup_ddp, setup_ddp
from yolo_seg_ddp.utils.errors import UserError, explain_out_of_memory, run_script
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save
from yolo_seg_ddp.utils.text import counted

FINAL_LR_SHARE = 0.01
ANNOTATORS_LR = 0.03  # of the logits of annotators' η, and of log ν
SAVE_EVERY_S = 600.0  # a killed run loses ten minutes at most
PREFETCH = 4  # batches that each loader process keeps ready
RESULTS_FILE = "evaluation_results.json"
FINAL_MODEL = "final_model.pt"


def main() -> int:
    """Train; return the exit code."""
    config = read_options(sys.argv[1:])
    notes = adopt_launch_flags(config)
    ranks = distributed.read_rank_environment()
    die_with_parent()
    say = distributed.main_printer(ranks.rank)
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(
        ranks.local_world_size, config.num_workers, device.type
    )
    if "OMP_NUM_THREADS" in os.environ:
        threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    seed_everything(config.seed)
    tune_device(device, deterministic=False, fixed_shapes=True)
    for note in notes:
        say(note)
    comparisons = None if config.data_source == "s3" else read_comparisons(config, say)
    # DDP copies rank 0's weights to all ranks: only rank 0 needs the pretrained ones.
    scorer = build_scorer(
        config.backbone,
        pretrained=config.pretrained and ranks.is_main,
        grad_checkpointing=config.grad_checkpointing,
        input_size=config.input_size,
    )
    setup_ddp(device, ranks)
    if distributed.is_distributed():
        say(f"Distributed training initialized with {ranks.world_size} processes")
    say(f"Using device: {device} (rank {ranks.rank})")
    too_large = (
        f"GPU {device.index}: --batch-size {config.batch_size} at --input-size {config.input_size} "
        f"does not fit its memory; use --batch-size {max(config.batch_size // 2, 1)}, --input-size "
        "384, --backbone efficientnet_b3 or --grad-checkpointing"
    )
    with explain_out_of_memory(too_large):
        if comparisons is None:
            distributed.run_once_per_machine(lambda: prepare_from_s3(config, say), ranks.local_rank)
            comparisons = read_comparisons(config, say)
        require_same_data(comparisons)
        may_resume = config.auto_resume or config.resume is not None
        with OwnedRun(config, may_resume) as run, ExitStack() as at_end:
            # Before OwnedRun releases the lock, nobody else can hold this file.
            if ranks.is_main:
                folder = run.folder.absolute()
                at_end.callback(folder.with_name(f".{folder.name}.lock").unlink, missing_ok=True)
            say("\n".join([*run.notes, *data_lines(config, comparisons, ranks)]))
            bytes_per_batch = 2 * batch_bytes(config.batch_size, config.input_size)
            workers, notes = plan_loader(workers, PREFETCH, bytes_per_batch, ranks.local_world_size)
            say(
                "\n".join(
                    [
                        *notes,
                        f"{counted(threads, 'thread')} and {counted(workers, 'loader worker')} "
                        "per process",
                    ]
                )
            )
            model = PairModel(scorer, *eta_of(config, comparisons), first_draw_log(comparisons))
            code = train(config, run, device, model, comparisons, workers)
    # Not after an error: NCCL would wait for ranks that have not failed.
    cleanup_ddp()
    return code


def read_comparisons(config: TrainConfig, say: Say) -> Comparisons:
    """Return the comparisons that the options name."""
    images = Path(config.image_dir)
    if config.prepared_data_dir is not None or config.data_source == "s3":
        return load_prepared(config.prepared_folder, images, say, learns_eta=config.learns_eta)
    return load_local(Path(config.data_dir), images, config.seed, say)


def eta_of(config: TrainConfig, comparisons: Comparisons) -> tuple[float | list[float], bool]:
    """Return the first reliability, the crowd's or each annotator's, and whether it is learned."""
    if config.loss == "bradley-terry":
        return 1.0, False
    measured = comparisons.measured.values()
    etas = [config.eta_init if eta is None else eta for eta in measured]
    return etas or config.eta_init, config.learns_eta


def first_draw_log(comparisons: Comparisons) -> float:
    """Return the first log ν, from the share of draws among the training answers."""
    weights = [(row.weight, row.label == 0) for row in comparisons.train]
    return draw_log_of(
        sum(weight * is_draw for weight, is_draw in weights), sum(weight for weight, _ in weights)
    )


def require_same_data(comparisons: Comparisons) -> None:
    """Raise UserError when the ranks read different comparisons: their copies
    of the data differ.
    """
    identity = [len(comparisons.train), len(comparisons.val), hash_of(comparisons)]
    if distributed.any_rank(distributed.broadcast_from_main(identity) != identity):
        raise UserError(
            "the machines read different comparisons or images; copy the same data to all of them"
        )


def hash_of(comparisons: Comparisons) -> int:
    """Return a number that differs between different comparisons, equal in all processes."""
    return zlib.crc32(repr((comparisons.train, comparisons.val)).encode())


def data_lines(config: TrainConfig, comparisons: Comparisons, ranks: RankInfo) -> list[str]:
    """Return lines about the data and the batch for the console."""
    if config.loss == "bradley-terry":
        mode = "1 (Bradley-Terry)"
    else:
        owner = (
            f"one for each of {len(names)} annotators"
            if (names := comparisons.measured)
            else "one for all"
        )
        is_measured = any(value is not None for value in names.values())
        first = "the measured one" if is_measured else f"{config.eta_init:g}"
        mode = f"{owner}, {first} at first, {'learned' if config.learns_eta else 'fixed'}"
    return [
        f"{len(comparisons.train)} training and {len(comparisons.val)} validation pairs; "
        f"reliability: {mode}",
        f"Batch size per GPU: {config.batch_size}, effective batch size: "
        f"{config.batch_size * ranks.world_size}",
    ]


def train(
    config: TrainConfig,
    run: OwnedRun,
    device: torch.device,
    model: PairModel,
    comparisons: Comparisons,
    workers: int,
) -> int:
    """Train in an open run folder, as a member of the process group; return the exit code."""
    rank, world_size = distributed.rank(), distributed.world_size()
    manifest = {
        "global_batch_size": config.batch_size * world_size,
        "comparisons": hash_of(comparisons),
    }
    require_same(config, run, manifest)
    pin_memory = device.type == "cuda"
    pairs = training_pairs(config, comparisons)
    batches = EpochBatches(len(pairs), config.batch_size, rank, world_size, config.seed)
    task = PairComparison(
        comparisons, {"backbone_name": config.backbone, "input_size": config.input_size}
    )
    optimizer = build_optimizer(model, config)
    engine = TrainingEngine(
        model, device, engine_options(config), task=task, run=run.folder, manifest=manifest
    )
    task.state = engine.state
    if distributed.is_distributed():
        engine.log.print("Model wrapped with DistributedDataParallel")
    val_loader = image_loader(
        task.val_images,
        Path(config.image_dir),
        config.input_size,
        2 * config.batch_size,
        min(workers, 2),
        pin_memory,
    )
    engine.train(
        get_dataloader(pairs, batches, workers, pin_memory, PREFETCH),
        val_loader,
        optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: cosine(epoch, config.epochs)
        ),
        resume=run.resumes,
    )
    progress = engine.progress
    if not engine.stopped_by:
        conclude(engine, task, comparisons, val_loader)
    return run.conclude(engine.stopped_by, epoch=progress.epoch, step=progress.global_step)


def training_pairs(config: TrainConfig, comparisons: Comparisons) -> Pairs:
    """Return the training pairs, each with its annotator's place among the reliabilities."""
    folder = Path(config.image_dir)
    return Pairs(
        comparisons.train,
        folder,
        config.input_size,
        config.seed,
        config.rotation,
        annotators=comparisons.measured,
    )


def engine_options(config: TrainConfig) -> EngineOptions:
    """Return the engine's options."""
    return EngineOptions(
        epochs=config.epochs,
        ema=False,
        patience=0,
        precision="auto" if config.amp else "off",
        sync_batchnorm=config.sync_batchnorm,
        # The accuracy stays at 0 while all differences count as draws.
        monitor="val_loss",
        save_every_s=SAVE_EVERY_S,
        seed=config.seed,
    )


def require_same(config: TrainConfig, run: OwnedRun, manifest: dict[str, int]) -> None:
    """Raise UserError when a resumed run would get other comparisons or another effective batch
    size.
    """
    earlier = {name: run.choices.get(name, value) for name, value in manifest.items()}
    if not run.resumes or earlier == manifest:
        return
    before, now = (each["global_batch_size"] for each in (earlier, manifest))
    what = "began with other comparisons; bring them back"
    if before != now:
        what = (
            f"trains with an effective batch size of {before}, not {now}; start "
            f"{before / config.batch_size:g} processes"
        )
    raise UserError(
        f"{config.checkpoint_dir}: {what}, or use --no-auto-resume or another --checkpoint-dir"
    )


def build_optimizer(model: PairModel, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW for the scorer, log ν and, if they are learned, the reliabilities."""
    groups: list[dict[str, Any]] = [
        {"params": list(model.scorer.parameters())},
        {"params": [model.draw_log], "lr": ANNOTATORS_LR, "weight_decay": 0.0},
    ]
    if model.eta_logit is not None:
        # A crowd's η, which has no prior, falls towards 0.5 when it learns faster than the first
        # qualities.
        eta_lr = config.eta_lr or (ANNOTATORS_LR if model.eta_logit.dim() else config.lr)
        groups.append({"params": [model.eta_logit], "lr": eta_lr, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay)


def cosine(epoch: int, epochs: int) -> float:
    """Return the learning rate of an epoch, counted from 0, as a share of the first: half a cosine
    down to 1 %.
    """
    return (
        FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * min(epoch / epochs, 1))) / 2
    )


def conclude(
    engine: TrainingEngine, task: PairComparison, comparisons: Comparisons, val_loader: object
) -> None:
    """Evaluate the best model on all ranks; rank 0 writes final_model.pt and the results.

    Every rank must reach this.
    """
    folder, model = engine.log.run_dir, engine.state.model
    assert isinstance(model, PairModel)

    def write_final() -> None:
        history = engine.progress.history
        info = {
            "epoch": engine.progress.epoch,
            "metrics": {name: values[-1] for name, values in history.items()},
        }
        atomic_torch_save(task.content(model, info), folder / FINAL_MODEL)

    distributed.run_on_main(write_final)
    best = folder / BEST_MODEL

    def load_best() -> None:
        if best.exists():
            saved = read_checkpoint(best)
            model.scorer.load_state_dict(saved["model"])
            if model.eta_logit is not None:
                model.eta_logit.data.copy_(torch.as_tensor(saved["eta_logit"]))

    distributed.run_on_main(load_best)
    # The other machines may not see rank 0's files.
    if distributed.is_distributed():
        for tensor in model.scorer.state_dict().values():
            torch.distributed.broadcast(tensor, 0)
    scores = score_images(
        model.scorer, val_loader, task.val_images, engine.device, engine.precision
    )  # type: ignore[arg-type]
    results = evaluation(comparisons.val, scores, comparisons.known_order)
    eta = task.eta_of(model)
    if isinstance(eta, dict):
        results["annotators"] = annotator_table(comparisons, eta)

    def write_results() -> None:
        write_json(
            folder / RESULTS_FILE,
            {"model": BEST_MODEL, "epoch": engine.progress.best_epoch + 1, **results},
        )
        add_to_log(folder, {"evaluation": results}, lambda earlier: "evaluation" not in earlier)

    distributed.run_on_main(write_results)
    engine.log.print(
        f"\nTraining complete after {counted(engine.progress.epoch, 'epoch')}: {best} (epoch "
        f"{engine.progress.best_epoch + 1})",
        *evaluation_lines(results),
    )


if __name__ == "__main__":
    run_script(main)
