"""Parts that train: every precision, equal runs, and runs that are killed
or stopped and resumed.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.plan import Finding, Json, NeedsGpu, PartFailed, Setting
from benchmarks.jobs import Job, difference
from train_yolo_ddp import train as run
from yolo_seg_ddp.engine.loading import tensors_in
from yolo_seg_ddp.engine.recovery import all_finite
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.run.records import METRICS_FILE, parse_record, read_epochs
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.launch import CPU_PROCESSES
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_STOPPED_BY_SIGNAL

MOST_SKIPPED = 8  # fp16's first steps: from 2^6, the scaler's start, down to 2^-2
WAIT_S = 150.0
VARIANTS = {
    "accumulation": ["--accumulate=2"],
    "multi-scale": ["--multi-scale"],
    "YOLO11": ["--model=yolo11n-seg.yaml"],
    "YOLO26": ["--model=yolo26n-seg.yaml"],
}

# --- precisions -----------------------------------------------------------------------------------


def compare_precisions(optimizer: str, setting: Setting) -> Finding:
    """Train the same run in fp32 and in 16 bits: finite weights, a loss near fp32's, no skipped
    steps after the first.
    """
    figures: dict[str, Json] = {}
    for precision in precisions_of(setting):
        folder = precision_folder(setting, optimizer, precision)
        train_here(setting, folder, f"--amp={precision}", f"--optimizer={optimizer}")
        figures[precision] = health(
            folder, figures["off"]["loss"] if figures else None, setting.sizes.loss_within
        )
    problems = [
        f"{name}: {problem}" for name, values in figures.items() for problem in values["problems"]
    ]
    said = ", ".join(
        f"{'fp32' if name == 'off' else name} loss {values['loss']:.3f}"
        for name, values in figures.items()
    )
    if problems:
        raise PartFailed(f"{'; '.join(problems)} ({said})", **figures)
    if not setting.is_gpu:
        raise NeedsGpu(f"for fp16; {said}", **figures)
    skipped = ", ".join(
        f"{values['skipped']} in {name}" for name, values in figures.items() if values["skipped"]
    )
    return Finding(f"{said}; skipped steps: {skipped or 'none'}", dict(figures))


def precisions_of(setting: Setting) -> Sequence[str]:
    """Return fp32 and the 16-bit precisions of the device."""
    if not setting.is_gpu:
        return ("off", "bf16")
    return (
        "off",
        *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []),
        "fp16",
    )


def train_variants(setting: Setting) -> Finding:
    """Train in the default precision with each of VARIANTS: every run must end well, with finite
    weights.
    """
    figures = {}
    for name, flags in VARIANTS.items():
        folder = setting.folder / "variants" / name
        train_here(setting, folder, *flags)
        figures[name] = health(folder, None, 0)
    problems = [
        f"{name}: {problem}" for name, values in figures.items() for problem in values["problems"]
    ]
    said = ", ".join(f"{name} {values['loss']:.2f}" for name, values in figures.items())
    if problems:
        raise PartFailed(f"{'; '.join(problems)} (losses: {said})", **figures)
    return Finding(f"losses: {said}", dict(figures))


def precision_folder(setting: Setting, optimizer: str, precision: str) -> Path:
    """Return the run folder of one of these trainings."""
    return setting.folder / f"precision_{optimizer}" / precision


def train_here(setting: Setting, folder: Path, *flags: str) -> None:
    """Run the trainer in this process. Raises PartFailed when its exit code is not 0."""
    sizes = setting.sizes
    shape = [
        f"--img-size={sizes.small_px}",
        f"--batch-size={sizes.batch_size}",
        f"--epochs={sizes.epochs}",
    ]
    words = [*common_flags(setting, folder), *shape, *flags]
    print("$ train_yolo_ddp.py", *words, flush=True)
    if code := run(parse_config(TrainConfig, "", words))[1]:
        raise PartFailed(f"{' '.join(flags)}: the trainer ended with {code}")


def common_flags(setting: Setting, folder: Path) -> list[str]:
    """Return the trainer's flags that all trainings here share."""
    device = "cuda:0" if setting.is_gpu else "cpu"
    place = [f"--data={setting.data}", f"--save-dir={folder}", f"--device={device}"]
    workers = (
        ["--num-workers=2", "--threads=2"] if setting.is_gpu else ["--num-workers=0", "--threads=1"]
    )
    return [
        "--model=yolov8n-seg.yaml",
        *place,
        *workers,
        "--no-tensorboard",
        "--val-pictures-every=0",
    ]


def health(folder: Path, fp32_loss: float | None, within: float) -> Json:
    """Return the mean loss, the skipped steps, the scaler's scale and the problems of a finished
    run.

    `within`: how far the run's mean loss may be from fp32's, relative.
    """
    newest = load_latest(folder / "checkpoint")
    if newest is None:
        raise PartFailed(f"{folder} holds no checkpoint")
    state = newest[1]
    epochs, skips = read_epochs(folder), skip_records(folder)
    loss = statistics.mean(epoch["train_loss"] for epoch in epochs)
    first_epoch_steps = epochs[0]["global_step"]
    problems = []
    if not all_finite(tensors_in([state["model"], state["ema"], state["optimizer"]])):
        problems.append("weights or the optimizer's state are not finite")
    if fp32_loss is not None and not abs(loss / fp32_loss - 1) <= within:
        problems.append(f"its loss {loss:.4g} is not within {within:.0%} of fp32's {fp32_loss:.4g}")
    num_skipped = skips[-1]["skipped"] if skips else 0
    may_skip = MOST_SKIPPED if state["scaler"] else 0
    if num_skipped > may_skip or any(skip["global_step"] > first_epoch_steps for skip in skips):
        problems.append(
            f"{num_skipped} steps were skipped, the last ones before step "
            f"{skips[-1]['global_step']}"
        )
    scale = (state["scaler"] or {}).get("scale")
    metrics = {
        name: epochs[-1].get(name)
        for name in ("val_loss", "mask_map50_95", "images_per_s", "data_wait_share")
    }
    return {"loss": loss, "skipped": num_skipped, "scale": scale, "problems": problems, **metrics}


def skip_records(folder: Path) -> list[Json]:
    """Return the records of skipped steps, oldest first."""
    lines = (folder / METRICS_FILE).read_bytes().splitlines()
    return [
        record for line in lines if (record := parse_record(line)) and record.get("kind") == "skip"
    ]


# --- the launcher ---------------------------------------------------------------------------------


def train_with_launcher(setting: Setting) -> Finding:
    """Train through train_ddp.sh, which starts one process per GPU; on a CPU two."""
    sizes = setting.sizes
    folder = setting.folder / "launcher"
    # the last one counts
    flags = [*common_flags(setting, folder / "run"), f"--device={setting.device}"]
    shape = [f"--img-size={sizes.small_px}", f"--batch-size={sizes.batch_size}", "--epochs=1"]
    with Job(
        ["bash", "train_ddp.sh", "--", *flags, *shape], folder / "log", PYTHON=sys.executable
    ) as job:
        code = job.wait(2 * WAIT_S)
    expected = f"Starting {setting.num_gpus or CPU_PROCESSES} process(es) on {setting.device}"
    if code or expected not in job.output():
        raise PartFailed(
            f"exit code {code}, {'no ' if expected not in job.output() else ''}`{expected}`: "
            f"{job.last_line()}"
        )
    last = read_epochs(folder / "run")[-1]
    figures = {
        name: last[name] for name in ("train_loss", "val_loss", "images_per_s", "data_wait_share")
    }
    return Finding(f"{expected.removeprefix('Starting ')}: loss {last['train_loss']:.3f}", figures)


# --- equal, killed and stopped runs ---------------------------------------------------------------


class Run:
    """A training in a process of its own, of a run folder that it resumes
    when it is started again.
    """

    def __init__(self, setting: Setting, folder: Path, *flags: str) -> None:
        sizes = setting.sizes
        shape = [
            f"--img-size={sizes.tiny_px}",
            "--batch-size=8" if setting.is_gpu else "--batch-size=4",
            "--epochs=4",
        ]
        often = "--save-every-minutes=0.02"
        self.folder = folder / "run"
        self.log = folder / "log"
        flags = (*common_flags(setting, self.folder), *shape, often, *flags)
        self._command = [sys.executable, "train_yolo_ddp.py", *flags]

    def start(self) -> Job:
        """Begin, or resume."""
        return Job(self._command, self.log)

    def finish(self, job: Job) -> None:
        """Wait for a good end. Raises PartFailed otherwise."""
        if code := job.wait(WAIT_S):
            raise PartFailed(
                f"{self.folder.parent.name}: the training ended with {code}: {job.last_line()}"
            )

    def interrupt(self, job: Job, number: signal.Signals, expected: int) -> None:
        """Send a signal in mid-run, once a second checkpoint stands; the process must end with the
        code `expected`.
        """
        job.wait_until(lambda: len(self.checkpoints()) >= 2, "second checkpoint", WAIT_S)
        job.process.send_signal(number)
        code = job.wait(WAIT_S)
        if code != expected:
            raise PartFailed(
                f"{self.folder.parent.name}: code {code} after {number.name} instead of {expected}"
            )

    def finish_resumed(self, job: Job) -> None:
        """Wait for a good end of the second start.

        Raises PartFailed unless it continued from a checkpoint.
        """
        self.finish(job)
        if "Resumed from" not in job.output():
            raise PartFailed(f"{self.folder.parent.name}: the second start did not resume")

    def checkpoints(self) -> list[Path]:
        """Return the folders of its checkpoints."""
        return list((self.folder / "checkpoint").glob("step-*"))


def compare_deterministic_runs(setting: Setting) -> Finding:
    """Train with --deterministic: twice, killed and resumed, stopped and resumed; all must end with
    equal bits.
    """
    differences = compare_runs(setting, setting.folder / "deterministic", ["--deterministic"])
    wrong = {name: text for name, text in differences.items() if text}
    if wrong:
        raise PartFailed(
            "; ".join(f"{name}: {text}" for name, text in wrong.items()), differences=differences
        )
    return Finding(f"equal bits: {', '.join(differences)}", {"differences": differences})


def compare_default_runs(setting: Setting) -> Finding:
    """Do the same without --deterministic: each run must end well; whether bits are equal is only
    reported.
    """
    if not setting.is_gpu:
        raise NeedsGpu("a CPU is always deterministic")
    differences = compare_runs(setting, setting.folder / "default", [])
    said = "; ".join(f"{name}: {text or 'equal bits'}" for name, text in differences.items())
    return Finding(f"all resumed and finished. {said}", {"differences": differences})


def compare_runs(setting: Setting, folder: Path, flags: list[str]) -> dict[str, str]:
    """Train four runs side by side and disturb two; return how each differs from the first, empty
    if in no bit.
    """
    names = ("reference", "the same again", "killed and resumed", "stopped and resumed")
    first, second, killed, stopped = (
        Run(setting, folder / name.replace(" ", "_"), *flags) for name in names
    )
    with (
        first.start() as one,
        second.start() as two,
        killed.start() as three,
        stopped.start() as four,
    ):
        killed.interrupt(three, signal.SIGKILL, -signal.SIGKILL)
        stopped.interrupt(four, signal.SIGTERM, EXIT_STOPPED_BY_SIGNAL)
        first.finish(one)
        second.finish(two)
    with killed.start() as three, stopped.start() as four:
        killed.finish_resumed(three)
        stopped.finish_resumed(four)
    runs = zip(names[1:], (second, killed, stopped), strict=True)
    differences = {name: difference(run.folder, first.folder) for name, run in runs}
    (folder / "differences.json").write_text(json.dumps(differences))
    return differences
