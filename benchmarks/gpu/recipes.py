"""Time the training step of a recipe on one GPU in fp32, bf16 and fp16: what `DEVICE=cuda` adds to
the recipes' demos.

    python -m benchmarks.gpu.recipes gpu.json 20 recipes/crowd_bt/train --batch-size 8 ...

The training command, given as folder/module with its options, runs up to its first batch. This
batch is trained for 20 steps in each precision, after as many unmeasured ones, each time from the
same weights. The results go to gpu.json.
"""

import copy
import gc
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.plan import Json, Setting
from benchmarks.gpu.report import hardware
from benchmarks.gpu.trainings import precisions_of
from yolo_seg_ddp.engine import TrainingEngine
from yolo_seg_ddp.engine.loading import batches_from
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER
from yolo_seg_ddp.utils.errors import UsageError, UserError, run_script
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.text import format_bytes

ONE_GPU = Setting("cuda", 1, Path())


def main() -> None:
    """Let the command run until it trains, then measure."""
    if len(sys.argv) < 4 or not sys.argv[2].isdigit():
        raise UsageError(
            "expected FILE STEPS FOLDER/MODULE [OPTION ...], such as gpu.json 20 "
            "recipes/crowd_bt/train"
        )
    if not torch.cuda.device_count():
        raise UserError("PyTorch sees no GPU; the step of a recipe is measured on a GPU only")
    file, steps, script, *options = sys.argv[1:]
    folder, _, module = script.rpartition("/")

    def train(
        engine: TrainingEngine,
        loader: Any,
        _: Any,
        optimizer: Any,
        criterion: Any = None,
        *__: Any,
        **___: Any,
    ) -> None:
        engine.begin(optimizer, criterion)
        batch = next(iter(batches_from(loader, 0, 0, engine.options.seed)))
        steps_of = {
            name: measure(engine, name, batch, int(steps)) for name in precisions_of(ONE_GPU)
        }
        content = {
            "command": " ".join([script, *options]),
            "environment": hardware(ONE_GPU),
            "steps": steps_of,
        }
        write_text_atomic(Path(file), json.dumps(content, indent=2) + "\n")
        print(f"\nTraining steps of {script} on {torch.cuda.get_device_name()}, also in {file}:")
        for name, now in steps_of.items():
            share = now["ms"] / steps_of["off"]["ms"]
            memory = format_bytes(now["peak_memory_bytes"])
            title = "fp32" if name == "off" else name
            print(
                f"  {title}: {now['ms']:.1f} ms ({share:.2f} of fp32), {memory}, mean loss "
                f"{now['train_loss']:.4f}"
            )
        # The rest of the command is not needed.
        raise SystemExit

    sys.path.insert(0, str(PROJECT_FOLDER / folder))
    sys.argv = [script, *options]
    with patch.object(TrainingEngine, "train", train):
        try:
            importlib.import_module(module).main()
        except SystemExit as end:
            if end.code is not None:
                raise


def measure(first: TrainingEngine, precision: str, batch: Any, steps: int) -> Json:
    """Return the step's time, peak memory and mean loss in a precision; leave weights and optimizer
    as they were.
    """
    model = first.state.model
    optimizer = first.state.optimizer
    loader = [batch] * steps
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gc.collect()  # of the precision before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(first.device)
    options = replace(first.options, precision=precision, quiet=True, log_interval=10**9)
    engine = TrainingEngine(model, first.device, options, task=first.task, run=first.log.run_dir)
    engine.begin(optimizer)
    # some tasks read the optimizer's rate there
    first.task.state = engine.state  # type: ignore[attr-defined]
    # The first steps do extra work.
    engine.train_one_epoch(loader)
    record: Any = engine.train_one_epoch(loader)
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    figures = {key: record[key] for key in ("peak_memory_bytes", "train_loss")}
    return {"ms": 1000 * record["epoch_time_s"] / steps, **figures}


if __name__ == "__main__":
    run_script(main)
