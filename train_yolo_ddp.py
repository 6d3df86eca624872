"""Train YOLO segmentation on one process or many.

    python train_yolo_ddp.py --model yolov8n-seg.pt --epochs 10 --batch-size 16
    bash train_ddp.sh 4
    python -m torch.distributed.run --nproc_per_node=4 train_yolo_ddp.py --model yolov8m-seg.pt

The same command again continues an interrupted run. `--help` lists every option with its default.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from utils import distributed
from utils.common.config import parse_config
from utils.common.devices import choose_precision
from utils.common.errors import explain_out_of_memory, run_script
from utils.common.files import output_folder
from utils.common.signals import die_with_parent
from utils.common.text import next_command
from utils.data.dataset_yaml import load_dataset_yaml
from utils.distributed import cleanup_ddp, setup_ddp
from utils.engine import TrainingEngine
from utils.run.folder import OwnedRun, read_fingerprint, require_same_options, resume_arguments, without_local_rank
from utils.run.log import print_banner
from utils.run.mlflow import mirror
from utils.training.assembly import open_data, train
from utils.training.config import TrainConfig
from utils.training.plan import agree_batch_size, find_batch_size, plan_training, take_share
from utils.yolo.model import build_model, freeze_layers


def main() -> int:
    """Train; return the exit code."""
    description = "Train YOLO segmentation with DistributedDataParallel"
    config = parse_config(TrainConfig, description, resume_arguments(without_local_rank(sys.argv[1:])))
    die_with_parent()
    return run(config)[1]


def run(config: TrainConfig) -> tuple[dict[str, list[float]], int]:
    """Train; return the history, as `TrainingEngine.train` does, and the exit code. Every rank must reach this."""
    ranks = distributed.read_rank_environment()
    share = take_share(config, ranks)

    # Everything slow or likely to fail comes before the process group, so that no rank waits in a collective for it; what
    # can be refused without reading a photograph comes first.
    say = distributed.main_printer(ranks.rank)
    output_folder(config.save_dir, "--save-dir")
    require_same_options(config)
    choose_precision(config.amp, share.device)
    spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
    model = build_model(config.model, spec.names).to(memory_format=torch.channels_last)
    freeze_layers(model, config.freeze)
    data = open_data(config, spec, share.device, say)
    largest = find_batch_size(config, model, share.device, len(data.train) // ranks.world_size)

    setup_ddp(share.device, ranks)
    config = replace(config, batch_size=agree_batch_size(config, largest))
    too_large = (
        f"GPU {share.device.index}: --batch-size {config.batch_size} at {config.img_size} pixels does not fit its memory; "
        f"halve it and double --accumulate (the same training), or let --batch-size auto choose"
    )
    fingerprint = distributed.run_on_main(lambda: data.fingerprint(read_fingerprint(Path(config.save_dir))))
    with explain_out_of_memory(too_large), OwnedRun(config, data=fingerprint) as owned:
        print_banner(ranks.world_size, ranks.rank)
        plan = plan_training(config, share, owned, data)
        say("\n".join(plan.lines))
        with mirror(owned.folder, config.mlflow):
            engine = train(plan, share.device, model, owned, data)
            code = conclude(engine, plan.config, owned, say)
    cleanup_ddp()  # not after an error: NCCL would wait for ranks that have not failed
    return engine.progress.history, code


def conclude(engine: TrainingEngine, config: TrainConfig, run: OwnedRun, say: distributed.Say) -> int:
    """Report how the training ended, on the console and in the run's status; return the exit code."""
    progress, monitor = engine.progress, config.monitor
    reason = "stopped early" if progress.stopped_early else ""
    code = run.conclude(engine.stopped_by, reason, epoch=progress.epoch, step=progress.global_step)
    if engine.stopped_by:
        return code
    if progress.best_value is None:
        best = f"absent: {monitor} was never a number"
    else:
        best = f"{monitor} {progress.best_value:.4f}, epoch {progress.best_epoch + 1}"
    say(
        f"\nTraining complete after {progress.epoch} epochs: {run.folder / 'best.pt'} ({best}), {run.folder / 'last.pt'}"
    )
    if progress.best_value is not None:
        say(next_command("python", "evaluate_model.py", "--model", run.folder / "best.pt", "--data", config.data))
    return code


if __name__ == "__main__":
    run_script(main)
