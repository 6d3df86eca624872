"""A training, from the options of `train_yolo_ddp.py` to its exit code: the steps in their order."""

from dataclasses import replace
from pathlib import Path

import torch

from utils import distributed
from utils.common.config import section_of
from utils.common.errors import explain_out_of_memory
from utils.common.files import output_folder
from utils.common.text import coloured, next_command
from utils.data.augment import AugmentOptions
from utils.data.dataset import DataOptions
from utils.data.dataset_yaml import load_dataset_yaml
from utils.distributed import cleanup_ddp, setup_ddp
from utils.engine import TrainingEngine
from utils.engine.nonfinite import Diverged
from utils.run.folder import OwnedRun, read_fingerprint, require_same_options
from utils.run.log import print_banner
from utils.run.mlflow import mirror
from utils.training.assembly import train
from utils.training.config import MachineOptions, TrainConfig
from utils.training.data import open_data
from utils.training.plan import agree_batch_size, find_batch_size, largest_side_px, plan_training, take_share
from utils.yolo.model import build_model, freeze_layers, is_trained


def run(config: TrainConfig) -> tuple[dict[str, list[float]], int]:
    """Train; return the history, as `TrainingEngine.train` does, and the exit code. Every rank must reach this."""
    ranks = distributed.read_rank_environment()
    loading = section_of(config, DataOptions)
    share = take_share(section_of(config, MachineOptions), loading, ranks)

    # Everything slow or likely to fail comes before the process group, so that no rank waits in a collective for it; what
    # can be refused without reading a photograph comes first.
    say = distributed.main_printer(ranks.rank)
    output_folder(config.save_dir, "--save-dir")
    require_same_options(config, may_move=True)  # whether it is the same data set is seen when it is read
    spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
    model = build_model(config.model, spec.names).to(memory_format=torch.channels_last)
    freeze_layers(model, config.freeze)
    data = open_data(config, spec, share.device, say)
    largest = None
    if not config.batch_size:
        sample = (largest_side_px(loading), section_of(config, AugmentOptions))
        largest = find_batch_size(share.device, share.precision, model, *sample, len(data.train) // ranks.world_size)

    setup_ddp(share.device, ranks)
    config = replace(config, batch_size=agree_batch_size(config.batch_size, largest, Path(config.save_dir)))
    too_large = (
        f"GPU {share.device.index}: --batch-size {config.batch_size} at {config.img_size} pixels does not fit its memory; "
        f"halve it and double --accumulate (the same training), or let --batch-size auto choose"
    )
    fingerprint = distributed.run_on_main(lambda: data.fingerprint(read_fingerprint(Path(config.save_dir))))
    with explain_out_of_memory(too_large), OwnedRun(config, data=fingerprint) as owned:
        print_banner(ranks.world_size, ranks.rank)
        plan = plan_training(config, share, owned, data, is_trained=is_trained(model))
        say("\n".join(plan.lines))
        with mirror(owned.folder, config.mlflow):
            engine = train(plan, share.device, model, owned, data)
            code = conclude(engine, owned, config)
    cleanup_ddp()  # not after an error: NCCL would wait for ranks that have not failed
    return engine.progress.history, code


def conclude(engine: TrainingEngine, run: OwnedRun, config: TrainConfig) -> int:
    """Report how the training ended, on the console and in the run's status; return the exit code. Raises Diverged without a model."""
    progress, monitor, say = engine.progress, engine.options.monitor, engine.log.print
    if progress.best_value is None and not engine.stopped_by:
        raise Diverged(f"{run.folder}: no best.pt, because {monitor} was never a number; lower --lr or --batch-size")
    reason = "stopped early" if progress.stopped_early else ""
    code = run.conclude(engine.stopped_by, reason, epoch=progress.epoch, step=progress.global_step)
    if engine.stopped_by:
        return code
    words, best = f"\nTraining complete after {progress.epoch} epochs", progress.best_epoch
    say(f"{words}; the best is epoch {best + 1}, by {monitor} {progress.best_value:.4f}:")
    scores = [f"{kind} mAP50-95 {progress.history[f'{kind}_map50_95'][best]:.4f}" for kind in ("mask", "box")]
    where = "windows" if config.windows else "whole photographs"
    say(f"  {coloured(', '.join(scores), 'green')} on {where} at {config.img_size} px")
    if config.windows:
        say("  evaluate_model.py measures whole photographs at their own size: other scores")
    say(f"Files in {run.folder}: best.pt, last.pt, results.csv, results.png")
    say(next_command("python", "evaluate_model.py", "--model", run.folder / "best.pt", "--data", config.data))
    return code
