"""Parts that measure training. Each of them runs alone."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path

from benchmarks import comparison
from benchmarks.comparison import PROJECT, SIDES, ULTRALYTICS
from benchmarks.gpu.plan import Finding, Json, PartFailed, Setting
from benchmarks.jobs import Job
from yolo_seg_ddp.data.loader import EpochLoader
from yolo_seg_ddp.measure.step_ranges import training_loader
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.text import format_bytes

# share of the time spent waiting for batches, from which more loader workers help
LOADER_BOUND = 0.10
COMPARED = {"images_per_s": "images/s", "epoch_s": "time of an epoch", "wall_s": "time of all"}
SHOWN = (*COMPARED, "epochs", "peak_memory_bytes", "peak_gpu_memory_bytes")
# Ultralytics' trainer imports polars only to read its own results.csv again, which may fail.
NO_POLARS = '"""Stands in for polars."""\n'


def script_figures(setting: Setting, name: str, answer: Path, *command: str) -> Json:
    """Run a script that writes JSON to `answer`; return all but the machine's report.

    Raises PartFailed when it fails.
    """
    answer.unlink(missing_ok=True)
    answer.parent.mkdir(parents=True, exist_ok=True)
    with Job(
        [sys.executable, *command, f"--device={setting.device}"], answer.parent / "log"
    ) as job:
        code = job.wait(600)
    lines = [line.strip() for line in job.output().splitlines() if line.strip()]
    if code:
        raise PartFailed(
            f"{name} ended with {code}: {lines[-1] if lines else 'it printed nothing'}"
        )
    content: Json = json.loads(answer.read_text(encoding="utf-8"))
    return {name: value for name, value in content.items() if name != "environment"}


# --- training -------------------------------------------------------------------------------------


def profile(setting: Setting) -> Finding:
    """Run profile_gpu.py: speed and memory of a step at several batch sizes."""
    sizes = setting.sizes
    folder = setting.folder / "profile"
    batches = [str(number) for number in sizes.batch_sizes]
    flags = [
        f"--model={sizes.large_model}",
        f"--img-size={sizes.full_px}",
        f"--steps={sizes.steps}",
    ]
    command = [
        "profile_gpu.py",
        *flags,
        *setting.threads,
        f"--output={folder}",
        "--batch-sizes",
        *batches,
    ]
    figures = script_figures(setting, "profile_gpu.py", folder / "profile.json", *command)
    (best,) = [
        one for one in figures["profiles"] if one["batch_size"] == figures["best_batch_size"]
    ]
    return Finding(
        f"best batch {best['batch_size']}: {best['images_per_s']:.0f} images/s, "
        f"{format_bytes(best['allocated_bytes'])}, "
        f"largest that fits: {figures['largest_batch_size']}",
        figures,
    )


def compare_steps(size: str, setting: Setting) -> Finding:
    """Time a training step of this project and of Ultralytics in turn: the model n with
    photographs, or the model m.
    """
    sizes = setting.sizes
    answer = setting.folder / f"train_step_{size}" / "step.json"
    model, batch_size = (
        (sizes.small_model, sizes.batch_size)
        if size == "n"
        else (sizes.large_model, sizes.large_batch)
    )
    flags = [f"--data={setting.data.with_name('long_epoch.yaml')}"] if size == "n" else []
    shape = [f"--img-size={sizes.full_px}", f"--batch-size={batch_size}", f"--steps={sizes.steps}"]
    pace = [f"--rounds={sizes.rounds}", f"--warmup={sizes.rounds}", f"--json={answer}"]
    command = [
        "benchmarks/train_step.py",
        f"--model={model}",
        *shape,
        *pace,
        *setting.threads,
        *flags,
    ]
    figures = script_figures(setting, "train_step.py", answer, *command)
    ours, theirs = figures["sides"]["project"], figures["sides"]["ultralytics"]
    said = (
        f"ours {ours['images_per_s']:.0f} images/s, Ultralytics {theirs['images_per_s']:.0f}: "
        f"ratio {figures['ratio']:.2f}"
    )
    return Finding(said, figures)


def loading(setting: Setting) -> Finding:
    """Measure the small model, whose steps are short, with 8 loader processes and with as many as
    the trainer chooses.

    The loader alone shows what it can deliver; of a training, the epoch with the least waiting for
    data counts.
    """
    sizes, figures = setting.sizes, {}
    data = setting.data.with_name("long_epoch.yaml")
    default = choose_threads_and_workers(1, device_type=setting.device)[1]
    for workers in sorted({min(8, max(default, 1)), max(default, 1)}):
        loader = training_loader(
            str(data), sizes.full_px, sizes.loaded_batch, workers, setting.is_gpu
        )
        alone = loaded_per_s(loader, sizes.seconds)
        del loader  # its processes
        folder = setting.folder / "loader" / str(workers)
        flags = [
            f"--model={sizes.small_model}",
            f"--data={data}",
            f"--save-dir={folder / 'run'}",
            "--no-tensorboard",
        ]
        flags += [
            f"--img-size={sizes.full_px}",
            f"--batch-size={sizes.loaded_batch}",
            f"--epochs={sizes.epochs + 1}",
        ]
        flags += [f"--num-workers={workers}", "--val-pictures-every=0", *setting.threads]
        flags += [f"--device={'cuda:0' if setting.is_gpu else 'cpu'}"]
        with Job([sys.executable, "train_yolo_ddp.py", *flags], folder / "log") as job:
            if code := job.wait(400):
                raise PartFailed(f"the training ended with {code}; see {folder / 'log'}")
        best = min(read_epochs(folder / "run")[1:], key=lambda epoch: epoch["data_wait_share"])
        seen = {name: best[name] for name in ("images_per_s", "data_wait_share")}
        figures[str(workers)] = {"loader_alone_images_per_s": alone, **seen}
    said = "; ".join(
        f"{workers} processes: loader alone {speeds['loader_alone_images_per_s']:.0f} images/s, "
        f"training {speeds['images_per_s']:.0f}, {speeds['data_wait_share']:.0%} of it waiting"
        for workers, speeds in figures.items()
    )
    last = figures[str(max(default, 1))]["data_wait_share"]
    verdict = "bound by the loader" if last > LOADER_BOUND else "not bound by the loader"
    return Finding(
        f"batch {sizes.loaded_batch}: {said}; {verdict}",
        {"batch_size": sizes.loaded_batch, **figures},
    )


def loaded_per_s(loader: EpochLoader, seconds: float) -> float:
    """Return the images/s of whole epochs of a loader that nobody waits
    for, after a first epoch.
    """
    num_images, start_s = 0, 0.0
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        num_in_epoch = sum(len(batch) for batch in loader)
        if not epoch:
            start_s = time.perf_counter()  # the processes have started
            continue
        num_images += num_in_epoch
        if (elapsed_s := time.perf_counter() - start_s) > seconds:
            break
    return num_images / elapsed_s


def against_ultralytics(setting: Setting) -> Finding:
    """Train a few epochs with this project and with Ultralytics, each with its defaults, without
    scores.
    """
    sizes = setting.sizes
    folder = setting.folder / "vs_ultralytics"
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("polars") is None:
        stand_in = folder / "stand_in"
        stand_in.mkdir(exist_ok=True)
        (stand_in / "polars.py").write_text(NO_POLARS)
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(stand_in)])
    shape = (
        sizes.small_model,
        sizes.epochs if setting.is_gpu else 1,
        sizes.full_px,
        sizes.batch_size,
    )
    options = comparison.Setting(*shape, device=setting.device)
    data = comparison.open_data(setting.data.with_name("long_epoch.yaml"), folder)
    runs = {side: comparison.train_side(options, data, 0, side, folder)[0] for side in SIDES}
    with_amp = runs[ULTRALYTICS]["mixed_precision"]
    if with_amp != setting.is_gpu:
        raise PartFailed(
            f"Ultralytics trained {'with' if with_amp else 'without'} mixed precision", **runs
        )
    ours, theirs = runs[PROJECT], runs[ULTRALYTICS]
    said = ", ".join(f"{title} {ours[name] / theirs[name]:.2f}" for name, title in COMPARED.items())
    return Finding(
        f"ours over Ultralytics': {said}",
        {side: {name: run[name] for name in SHOWN} for side, run in runs.items()},
    )
