"""Do one job with Ultralytics in its own process: `ultralytics_job.py JOB.json ANSWER.json`.

The job's `action` is `start` (write initial weights), `train` (train from them) or `val` (evaluate
a weights file).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.comparison import Json
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import choose_device, seed_everything
from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.utils.errors import UserError, run_script
from yolo_seg_ddp.utils.files import write_bytes_atomic, write_text_atomic
from yolo_seg_ddp.yolo.model import build_model, load_weights, save_deployable

SCORES = {
    "mask_map50_95": "metrics/mAP50-95(M)",
    "mask_map50": "metrics/mAP50(M)",
    "box_map50_95": "metrics/mAP50-95(B)",
    "box_map50": "metrics/mAP50(B)",
}


def main() -> None:
    """Do the job of the file on the command line and write its answer."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    actions: dict[str, Callable[[Json], Json]] = {
        "start": write_initial_weights,
        "train": train,
        "val": run_ultralytics_validator,
    }
    answer = actions[job["action"]](job)
    write_text_atomic(Path(sys.argv[2]), json.dumps(answer, indent=2) + "\n")


def write_initial_weights(job: Json) -> Json:
    """Write the weights with which both trainers start: `job["model"]`, initialised with the job's
    seed.
    """
    seed_everything(job["seed"])
    model = build_model(job["model"], tuple(job["names"]))
    save_deployable(Path(job["weights"]), model, {}, img_size=job["img_size"], data=job["data"])
    return {"num_parameters": sum(parameter.numel() for parameter in model.parameters())}


def train(job: Json) -> Json:
    """Train with Ultralytics; return times and settings.

    Raises UserError unless it starts from the given weights.
    """
    device, threads, workers = machine_share(job["device"])
    yolo = _open(job["weights"])
    skip_trial_of_amp()
    clock = EpochClock()
    settings: Json = {"threads": threads, "workers": workers}

    def begin(trainer: Any) -> None:
        # select_device("cpu") takes one core away.
        torch.set_num_threads(threads)
        settings["num_transferred"] = require_same_weights(job["weights"], trainer.model)
        settings["optimizer"] = type(trainer.optimizer).__name__
        settings["lr"] = max(group["initial_lr"] for group in trainer.optimizer.param_groups)
        settings["mixed_precision"] = bool(trainer.amp)

    yolo.add_callback("on_train_start", begin)
    yolo.add_callback("on_val_start", lambda _: torch.set_num_threads(threads))
    yolo.add_callback("on_train_epoch_start", clock.start)
    yolo.add_callback("on_train_epoch_end", clock.stop)
    yolo.add_callback("on_fit_epoch_end", clock.end_of_epoch)
    arguments = {
        **{name: job[name] for name in ("data", "epochs", "seed")},
        "imgsz": job["img_size"],
        "batch": job["batch_size"],
        "nbs": job["nominal_batch"],
        "device": device,
        "workers": workers,
        "cache": "ram",
        "plots": False,
    }
    folder = Path(job["folder"]).resolve()
    yolo.train(**arguments, project=str(folder), name="run", exist_ok=True)
    kept = ("close_mosaic", "warmup_epochs", "cos_lr", "amp", "patience")
    settings.update({name: getattr(yolo.trainer.args, name) for name in kept})
    return {
        "best": "run/weights/best.pt",
        "train_s": clock.total_s,
        "epoch_s": statistics.median(clock.epochs_s),
        "epochs": clock.num_epochs,
        "arguments": arguments,
        **settings,
    }


def skip_trial_of_amp() -> None:
    """Let Ultralytics use AMP on a GPU without the trial for which it would download yolo26n.pt.

    Without a network it does the same. It still turns AMP off on the GPUs that it knows to be
    unsuitable.
    """
    import ultralytics
    from ultralytics.engine import trainer

    decide = trainer.check_amp

    def decide_offline(model: Any) -> bool:
        with patch.object(ultralytics, "YOLO", side_effect=ConnectionError):
            return bool(decide(model))

    trainer.check_amp = decide_offline


def run_ultralytics_validator(job: Json) -> Json:
    """Return the scores of a weights file by Ultralytics' `val()`."""
    device, threads, workers = machine_share(job["device"])
    yolo = _open(job["weights"])
    yolo.add_callback("on_val_start", lambda _: torch.set_num_threads(threads))
    results = yolo.val(
        data=job["data"],
        imgsz=job["img_size"],
        batch=job["batch_size"],
        device=device,
        workers=workers,
        plots=False,
        project=str(Path(job["folder"]).resolve()),
        name="val",
        exist_ok=True,
    )
    return {name: float(results.results_dict[theirs]) for name, theirs in SCORES.items()}


class EpochClock:
    """Sums the seconds of the epochs' training parts, and records those of whole epochs with
    validation.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self.epochs_s: list[float] = []
        self.num_epochs = 0
        self._start_s = 0.0

    def start(self, _: Any) -> None:
        """Begin an epoch."""
        self._start_s = time.perf_counter()

    def stop(self, _: Any) -> None:
        """End an epoch's training part."""
        self.total_s += time.perf_counter() - self._start_s
        self.num_epochs += 1

    def end_of_epoch(self, _: Any) -> None:
        """Record a whole epoch.

        Ultralytics calls this once more at the end, after evaluating its best weights.
        """
        if len(self.epochs_s) < self.num_epochs:
            self.epochs_s.append(time.perf_counter() - self._start_s)


def require_same_weights(weights: str, model: torch.nn.Module) -> int:
    """Return the number of tensors of `model`.

    Raises UserError unless all equal those of the file.
    """
    wanted = load_weights(weights).state_dict()
    loaded = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    different = [
        name
        for name, tensor in wanted.items()
        if name not in loaded or not torch.equal(loaded[name], tensor)
    ]
    if different or len(loaded) != len(wanted):
        raise UserError(
            f"{weights}: Ultralytics starts from other weights ({len(different)} of {len(wanted)} "
            f"tensors differ, such as {(different or ['one more'])[0]}); use a .yaml or a .pt "
            "whose classes are the data set's"
        )
    return len(wanted)


def machine_share(requested: str) -> tuple[str | int, int, int]:
    """Return the device in Ultralytics' form, and the compute threads and loader workers that the
    project would use.
    """
    device = choose_device(requested, 0)
    threads, workers = choose_threads_and_workers(1, device_type=device.type)
    return ("cpu" if device.type == "cpu" else device.index or 0), threads, workers


def _open(weights: str) -> Any:
    prepare_environment()
    import matplotlib
    from ultralytics import YOLO
    from ultralytics.utils import USER_CONFIG_DIR

    # Before reading a data set, Ultralytics looks for this font and would download it. Nothing is
    # drawn here.
    font = USER_CONFIG_DIR / "Arial.ttf"
    if not font.exists():
        source = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
        font.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(font, source.read_bytes())
    return YOLO(weights)


if __name__ == "__main__":
    run_script(main)
