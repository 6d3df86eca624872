"""Train CompressedAD on learning histories, in one process or in those of `accelerate launch`.

    accelerate launch --config_file accelerate_config.yaml train.py [configs/darkroom.yaml]

It takes no flags; the YAML file holds all options. The same command again continues an interrupted
run.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT)] if str(PROJECT) not in sys.path else []

from yolo_seg_ddp.utils.errors import UserError, run_script
from yolo_seg_ddp.utils.signals import die_with_parent

# Before the imports, which take seconds.
die_with_parent()

import torch

from recipes.compressed_ad.distillation import Distillation, loaders
from recipes.compressed_ad.histories import existing_file
from recipes.compressed_ad.model import CompressedAD
from recipes.compressed_ad.settings import Settings, settings_of_command_line
from recipes.compressed_ad.sizes import ModelSize
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.engine.schedule import ScheduleSpec, StepSchedule
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import seed_everything
from yolo_seg_ddp.utils.distributed import cleanup_ddp, read_rank_environment, setup_ddp
from yolo_seg_ddp.utils.options import section_of, to_dict

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = {"no": "off", "fp16": "fp16", "bf16": "bf16"}  # Accelerate's words and the engine's


def main() -> int:
    """Train; return the exit code."""
    config = settings_of_command_line()
    # Before anything is started or written.
    existing_file(config)
    accelerator = start(config)
    with OwnedRun(replace(config, save_dir=str(config.run_folder))) as run:
        if accelerator.is_main_process and run.notes:
            print(*run.notes, sep="\n", flush=True)
        engine = train(config, accelerator, run.resumes)
        code = run.conclude(engine.stopped_by)
    cleanup_ddp()
    return code


def start(config: Settings) -> Accelerator:
    """Join the launcher's process group and print what runs where."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import parse_flag_from_env
    except ImportError as error:
        raise UserError(
            "accelerate is missing: pip install -r requirements.txt in this folder"
        ) from error
    ranks = read_rank_environment()
    gpus = 0 if parse_flag_from_env("ACCELERATE_USE_CPU") else torch.cuda.device_count()
    if gpus and ranks.local_world_size > gpus:
        raise UserError(
            f"{ranks.local_world_size} processes but {gpus} visible GPU(s): set num_processes to "
            f"{gpus} in accelerate_config.yaml (--num_processes={gpus}), or use python train.py "
            "for a single one"
        )
    device = torch.device("cuda", ranks.local_rank) if gpus else torch.device("cpu")
    # `accelerate launch` sets it.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(choose_threads_and_workers(ranks.local_world_size, 0)[0])
    wanted = config.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if wanted == "fp16" and not gpus:
        if ranks.is_main:
            print("fp16 needs a GPU: training in fp32 on the CPU", flush=True)
        wanted = "no"
    # The guide's line reads it.
    config = replace(config, mixed_precision=wanted)
    # Without a GPU Accelerator would leave each process on its own, unless it is told that the CPU
    # is meant; with the process group that exists already it takes that one.
    setup_ddp(device, ranks)
    accelerator = Accelerator(
        cpu=not gpus,
        mixed_precision=config["mixed_precision"],
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    if accelerator.is_main_process:
        print(
            f"Distributed training: {accelerator.distributed_type.value}",
            f"Number of processes: {accelerator.num_processes}",
            f"Mixed precision: {accelerator.mixed_precision}",
            sep="\n",
            flush=True,
        )
    accelerator.wait_for_everyone()
    # The line and its end in one write: the processes print at the same time.
    print(f"Process {accelerator.process_index} using device: {device}\n", end="", flush=True)
    return accelerator


def train(config: Settings, accelerator: Accelerator, resume: bool) -> TrainingEngine:
    """Train until `train_timesteps`, or until a signal; return the engine."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    accumulate = accelerator.gradient_accumulation_steps
    train_batches, test_batches = loaders(config, accumulate, rank, world_size)
    seed_everything(config.seed)
    model = CompressedAD(section_of(config, ModelSize)).to(accelerator.device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(0.9, 0.99),
        weight_decay=config.weight_decay,
        fused=True,
    )
    spec = ScheduleSpec(
        config.lr,
        config.train_timesteps,
        config.warmup_steps,
        final_lr_fraction=0,
        momentum=0.9,
        warmup_momentum=0.9,
    )
    options = EngineOptions(
        epochs=config.train_timesteps // config.eval_interval,
        precision=PRECISIONS[accelerator.mixed_precision],
        accumulate=accumulate,
        ema=False,
        patience=0,
        clip_norm=config.clip_norm,
        # The checkpoint holds the weights.
        save_best=False,
        save_last=False,
        save_every_steps=config.ckpt_interval,
        seed=config.seed,
        log_interval=config.summary_interval * accumulate,
    )
    task = Distillation(config, world_size)
    engine = TrainingEngine(
        model,
        accelerator.device,
        options,
        task=task,
        run=config.run_folder,
        manifest={"config": to_dict(config)},
    )
    task.state = engine.state
    engine.log.print(
        f"{sum(weight.numel() for weight in model.parameters())} weights, "
        f"{sum(map(len, train_batches.records))} training records, "
        f"{sum(map(len, test_batches.records))} test records",
        f"Effective batch: {config.train_batch_size} x {world_size} x {accumulate} = "
        f"{config.train_batch_size * world_size * accumulate}; one epoch is "
        f"{config.eval_interval} steps",
    )
    engine.train(
        train_batches,
        test_batches,
        optimizer,
        scheduler=StepSchedule(optimizer, spec),
        resume=resume,
    )
    return engine


if __name__ == "__main__":
    run_script(main)
