"""Train YOLO segmentation on one process or many.

    python train_yolo_ddp.py --model yolov8n-seg.pt --epochs 10 --batch-size 16
    bash train_ddp.sh 4
    python -m torch.distributed.run --nproc_per_node=4 train_yolo_ddp.py

The same command again continues an interrupted run. `--help` lists every option with its default.
"""

from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.config import parse_config, show_help
from yolo_seg_ddp.utils.options import section_of

if __name__ == "__main__":
    show_help(TrainConfig, __doc__)

# --- the command, which needs PyTorch

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.loader import (
    EpochBatches,
    ShardBatches,
    get_dataloader,
    largest_side_px,
    multi_scale_sizes,
    val_prefetch,
)
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.engine.recovery import Diverged
from yolo_seg_ddp.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps
from yolo_seg_ddp.run.folder import (
    OwnedRun,
    require_same_options,
    resume_arguments,
    without_local_rank,
)
from yolo_seg_ddp.run.log import print_banner
from yolo_seg_ddp.run.options import LoopOptions
from yolo_seg_ddp.training.agreement import require_same_data, require_same_start
from yolo_seg_ddp.training.batch_size import agree_batch_size, find_batch_size
from yolo_seg_ddp.training.data import Data, open_data
from yolo_seg_ddp.training.pictures import save_first_pictures
from yolo_seg_ddp.training.plan import TrainPlan, plan_training, save_arguments, setup_device
from yolo_seg_ddp.training.task import Segmentation, follow_epochs
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.distributed import cleanup_ddp, setup_ddp
from yolo_seg_ddp.utils.errors import explain_out_of_memory, run_script
from yolo_seg_ddp.utils.extras import find_extra, require_extra
from yolo_seg_ddp.utils.files import output_folder
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.text import coloured, counted, next_command
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    build_model,
    equalise_filters,
    freeze_layers,
    is_trained,
)
from yolo_seg_ddp.yolo.optimizer import GRADIENT_CLIP_NORM, build_optimizer

# With fewer images per GPU batch statistics are shared by default.
SMALL_BATCH_SIZE = 16
# Each worker costs the memory of a process, on top of those that load for the training.
MOST_VAL_WORKERS = 8


@contextmanager
def started(config: TrainConfig) -> Iterator[tuple[TrainPlan, YoloModel, Data, OwnedRun]]:
    """Do all that is slow or likely to fail, make the process group, open the run's folder, and
    plan the training.

    The group is made late, so that no rank waits in a collective for what is slow. Every rank must
    reach this.
    """
    ranks = distributed.read_rank_environment()
    say = distributed.main_printer(ranks.rank)
    with distributed.meet(ranks) as meeting:
        setup = setup_device(config, ranks)
        device = setup.device

        # What can be refused without reading a photograph comes first.
        output_folder(config.save_dir, "--save-dir")
        if config.mirror and ranks.is_main:
            require_extra("mirror").fetch_lost_run(Path(config.save_dir), config.mirror, say)
        # Whether it is the same data set is seen when it is read.
        require_same_options(config, may_move=True)
        spec = load_dataset_yaml(
            config.data, trust_links=config.trust_links, cache_dir=config.cache_dir
        )
        model = build_model(config.model, spec.names, say).to(memory_format=torch.channels_last)
        freeze_layers(model, config.freeze)
        if is_trained(model):
            equalise_filters(model)
        require_same_start(meeting, config)

        sharers = meeting.sharers("cache", spec.cache_folder)
        share = (sharers.index(meeting.machine), len(sharers))
        with meeting.first_on_machine():
            data = open_data(config, spec, device, say, share, meeting.announce)
        largest = 0
        # 0 stands for --batch-size auto.
        if not config.batch_size:
            side_px = largest_side_px(config.img_size, multi_scale=config.multi_scale)
            num_images = len(data.train) // ranks.world_size
            largest = find_batch_size(device, setup.precision, model, side_px, config, num_images)

        largest = min(meeting.exchange("ready", largest))
        setup_ddp(device, ranks, meeting.store)

    require_same_data(meeting, data)
    batch_size = agree_batch_size(config.batch_size, largest, Path(config.save_dir))
    options = replace(config, batch_size=batch_size)
    too_large = (
        f"GPU {device.index}: --batch-size {batch_size} at {config.img_size} pixels does not fit "
        "its memory; "
        f"halve it and double --accumulate (the same training), or let --batch-size auto choose"
    )
    mlflow = find_extra("mlflow")
    with (
        explain_out_of_memory(too_large),
        OwnedRun(options, data=data.fingerprint if ranks.is_main else None) as run,
        distributed.run_on_main(lambda: mlflow and mlflow.mirror(run.folder, config.mlflow))
        or nullcontext(),
        distributed.run_on_main(
            lambda: (
                config.mirror
                and require_extra("mirror").Mirror(run.folder, config.mirror, run.resumes)
            )
        )
        or nullcontext(),
    ):
        print_banner(ranks.world_size, ranks.rank)
        plan = plan_training(options, setup, run, data, is_trained=is_trained(model))
        say("\n".join(plan.lines))
        yield plan, model, data, run


def train(config: TrainConfig) -> tuple[dict[str, list[float]], int]:
    """Train; return the history, one list per reported value, and the exit code.

    Every rank must reach this.
    """
    with started(config) as (plan, model, data, run):
        options = plan.options
        ranks = plan.setup.ranks
        device = plan.setup.device

        # The batches of each rank, and the loaders that make them.
        sizes = multi_scale_sizes(options.img_size) if options.multi_scale else ()
        share = (ranks.rank, ranks.world_size)
        batches = EpochBatches(
            len(data.train), options.batch_size, *share, options.seed, sizes, options.accumulate
        )
        val_batches = ShardBatches(len(data.val), 2 * options.batch_size, *share)
        distributed.run_on_main(lambda: save_arguments(plan, run.folder))
        if not run.resumes:
            distributed.run_on_main(
                lambda: save_first_pictures(data.train, batches, data.spec.names, run.folder)
            )

        # What one step does with them.
        optimizer = build_optimizer(model, plan.optimizer)
        shares_statistics = device.type == "cuda" and options.batch_size < SMALL_BATCH_SIZE
        engine_options = EngineOptions(
            **vars(section_of(options, LoopOptions)),
            precision=options.amp,
            clip_norm=GRADIENT_CLIP_NORM,
            sync_batchnorm=options.sync_bn == "on"
            or (options.sync_bn == "auto" and shares_statistics),
            static_graph=options.accumulate == 1,
            monitor=options.monitor,
            save_every_s=options.save_every_minutes * 60 or None,
        )
        task = Segmentation(plan, model, run, data)
        engine = TrainingEngine(
            model, device, engine_options, task=task, run=run.folder, manifest=plan.choices
        )
        follow_epochs(task.criterion, engine)
        steps = -(-len(batches) // options.accumulate)
        warmup = warmup_steps(options.warmup_epochs, steps, options.epochs)
        schedule = ScheduleSpec(
            plan.optimizer.lr, steps * options.epochs, warmup, momentum=plan.optimizer.momentum
        )
        engine.begin(optimizer, scheduler=StepSchedule(optimizer, schedule))

        pins = device.type == "cuda"
        train_loader = get_dataloader(data.train, batches, plan.workers, pins, options.prefetch)
        val_workers = min(plan.workers, len(val_batches), MOST_VAL_WORKERS)
        val_loader = get_dataloader(
            data.val, val_batches, val_workers, pins, val_prefetch(options.prefetch)
        )

        with engine.running(train_loader, resume=run.resumes):
            # No epoch begins after the last, after --patience, or when the ranks were told to stop.
            while engine.begin_epoch():
                # After several gradients that are not finite the run returns to its last
                # checkpoint.
                with engine.rolling_back():
                    record = engine.progress.record_awaiting_validation or engine.train_one_epoch(
                        train_loader
                    )
                    # This validates, reports and saves.
                    engine.finish_epoch(record, train_loader, val_loader)
        code = conclude(engine, run, plan)
    # Not after an error: NCCL would wait for ranks that have not failed.
    cleanup_ddp()
    return engine.progress.history, code


def conclude(engine: TrainingEngine, run: OwnedRun, plan: TrainPlan) -> int:
    """Report how the training ended, on the console and in the run's status; return the exit code.

    Raises Diverged without a model.
    """
    progress = engine.progress
    monitor = engine.options.monitor
    say = engine.log.print
    if progress.best_value is None and not engine.stopped_by:
        raise Diverged(
            f"{run.folder}: no best.pt, because {monitor} was never a number; lower --lr or "
            "--batch-size"
        )
    reason = "stopped early" if progress.stopped_early else ""
    code = run.conclude(engine.stopped_by, reason, epoch=progress.epoch, step=progress.global_step)
    if engine.stopped_by:
        return code
    words = f"\nTraining complete after {counted(progress.epoch, 'epoch')}"
    best = progress.best_epoch
    say(f"{words}; the best is epoch {best + 1}, by {monitor} {progress.best_value:.4f}:")
    scores = [
        f"{kind} mAP50-95 {progress.history[f'{kind}_map50_95'][best]:.4f}"
        for kind in ("mask", "box")
    ]
    where = "windows" if plan.options.windows else "whole photographs"
    say(f"  {coloured(', '.join(scores), 'green')} on {where} at {plan.options.img_size} px")
    if plan.options.windows:
        say("  evaluate_model.py measures whole photographs at their own size: other scores")
    say(f"Files in {run.folder}: best.pt, last.pt, results.csv, results.png")
    say(
        next_command(
            "python",
            "evaluate_model.py",
            "--model",
            run.folder / "best.pt",
            "--data",
            plan.options.data,
        )
    )
    return code


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(TrainConfig, __doc__, resume_arguments(without_local_rank(sys.argv[1:])))
    die_with_parent()
    return train(config)[1]


if __name__ == "__main__":
    run_script(main)
