"""Train and evaluate one side of the comparison at a time, each step in its own process.

A finished step is not repeated: it is kept in a folder whose name is a hash of all its inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from yolo_seg_ddp.data.dataset_yaml import DatasetSpec, label_file_for, load_dataset_yaml
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER, cpu_model, package_version, python_path
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.options import words_of

JOB_SCRIPT = PROJECT_FOLDER / "benchmarks" / "ultralytics_job.py"
SCORES = ("mask_map50_95", "mask_map50", "box_map50_95", "box_map50")
PROJECT, ULTRALYTICS = "project", "ultralytics"
SIDES = (PROJECT, ULTRALYTICS)
NATIVE = "project_native"
EVALUATORS = (PROJECT, NATIVE, ULTRALYTICS)  # native: ours, in the photographs' pixels

Json = dict[str, Any]
Run = Json


@dataclass(frozen=True)
class Setting:
    """Options that both sides get; everything else is each side's default.

    `nominal_batch` is for Ultralytics only, which accumulates gradients over that many images
    before a step; `extra` are further options of our training.
    """

    model: str
    epochs: int
    img_size: int
    batch_size: int
    device: str
    nominal_batch: int = 64
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Data:
    """One data set for both sides: the same images, with a YAML
    of absolute paths for Ultralytics.
    """

    yaml_file: Path
    ultralytics_yaml: Path
    spec: DatasetSpec
    num_train: int
    num_val: int
    fingerprint: str


def open_data(yaml_file: Path, folder: Path) -> Data:
    """Read the data-set YAML and write Ultralytics' copy of it into `folder`."""
    spec = load_dataset_yaml(yaml_file)
    files = {split: spec.image_files(split) for split in ("train", "val")}
    digest = hashlib.sha256()
    for image in (*files["train"], *files["val"]):
        label = label_file_for(image)
        size = label.stat().st_size if label.exists() else 0
        digest.update(f"{image.resolve()} {image.stat().st_size} {size}\n".encode())
    content = {"path": str(spec.root), "names": dict(enumerate(spec.names))}
    splits = {split: [str(source) for source in spec.splits[split]] for split in files}
    copy = folder / f"data-{digest.hexdigest()[:8]}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(copy, yaml.safe_dump({**content, **splits}, sort_keys=False))
    return Data(
        yaml_file.resolve(),
        copy.resolve(),
        spec,
        len(files["train"]),
        len(files["val"]),
        digest.hexdigest(),
    )


def compare(setting: Setting, data: Data, seed: int, side: str, folder: Path) -> tuple[Run, bool]:
    """Train `side` with `seed` and evaluate its best.pt with all EVALUATORS; return the run and
    whether it was kept.

    Kept means that `folder` already held a finished training with the same inputs. Raises UserError
    when a step fails.
    """
    run, home, is_kept = train_side(setting, data, seed, side, folder)
    # It is stored relative, so that the folder may be moved.
    best = (home / run["best"]).resolve()
    run["scores"] = {
        evaluator: scores(setting, data, best, evaluator, home) for evaluator in EVALUATORS
    }
    return run, is_kept


def train_side(
    setting: Setting, data: Data, seed: int, side: str, folder: Path
) -> tuple[Run, Path, bool]:
    """Train `side` with `seed`; return the run without scores, its folder, and whether it was kept
    (see `compare`).
    """
    start = initial_weights(setting, data, seed, folder)
    options = {
        **vars(setting),
        "side": side,
        "seed": seed,
        "data": data.fingerprint,
        "initial_weights": _digest([start]),
        **_versions(),
        **({"source": source_digest()} if side == PROJECT else {}),
    }
    del options["nominal_batch" if side == PROJECT else "extra"]
    home = folder / f"{side}-seed{seed}-{_short(options)}"
    answer_file = home / "training.json"
    is_kept = answer_file.exists() and (home / _read_json(answer_file)["best"]).exists()
    if not is_kept:
        # An unfinished training would resume, and its time would be wrong.
        if home.exists():
            shutil.rmtree(home)
        home.mkdir(parents=True)
        train = _train_project if side == PROJECT else _train_ultralytics
        answer = train(setting, data, seed, start, home)
        answer["images_per_s"] = data.num_train * answer["epochs"] / answer["train_s"]
        _write_json(answer_file, {"options": options, **answer})
    return {"side": side, "seed": seed, **_read_json(answer_file)}, home, is_kept


def initial_weights(setting: Setting, data: Data, seed: int, folder: Path) -> Path:
    """Return the weights file with which both sides start for this seed; it is written once, in
    half precision.
    """
    key = {
        "model": setting.model,
        "seed": seed,
        "names": data.spec.names,
        "img_size": setting.img_size,
        **_versions(),
    }
    if Path(setting.model).is_file():
        key["digest"] = _digest([Path(setting.model)])
    home = folder / f"start-seed{seed}-{_short(key)}"
    weights = home / "init.pt"
    if not weights.exists():
        home.mkdir(parents=True, exist_ok=True)
        job = {"action": "start", "model": setting.model, "seed": seed, "names": data.spec.names}
        place = {
            "weights": str(weights.resolve()),
            "img_size": setting.img_size,
            "data": str(data.yaml_file),
        }
        _ultralytics_job({**job, **place}, home, "start")
    return weights.resolve()


def scores(
    setting: Setting, data: Data, weights: Path, evaluator: str, home: Path
) -> dict[str, float]:
    """Return the AP of a weights file by one of EVALUATORS; reuse a result in `home`."""
    key = {"weights": _digest([weights]), "source": source_digest(), **_versions()}
    output = home / f"by-{evaluator}-{_short(key)}"
    answer_file = output.with_suffix(".json")
    if not answer_file.exists():
        size = {
            "img_size": setting.img_size,
            "batch_size": setting.batch_size,
            "device": setting.device,
        }
        if evaluator != ULTRALYTICS:
            options = {
                "model": weights,
                "data": data.yaml_file,
                "output": output,
                "predictions": False,
            }
            options |= {"mask_resolution": "native" if evaluator == NATIVE else None, **size}
            run_script(["evaluate_model.py", *words_of(options)], output.with_suffix(".log"))
            metrics = _read_json(output / "metrics.json")
        else:
            job = {
                "action": "val",
                "weights": str(weights),
                "data": str(data.ultralytics_yaml),
                "folder": str(output),
            }
            metrics, _, _ = _ultralytics_job({**job, **size}, home, output.name)
        _write_json(answer_file, {name: metrics[name] for name in SCORES})
    return _read_json(answer_file)


def source_digest() -> str:
    """Return a digest of the code that affects the training and evaluation
    of the project's side.
    """
    return _digest(
        [
            *sorted((PROJECT_FOLDER / "yolo_seg_ddp").rglob("*.py")),
            *sorted(PROJECT_FOLDER.glob("*.py")),
        ]
    )


def _train_project(setting: Setting, data: Data, seed: int, start: Path, home: Path) -> Json:
    folder = (home / "run").resolve()
    options: Json = {"model": start, "data": data.yaml_file, "save_dir": folder}
    options |= {name: getattr(setting, name) for name in ("epochs", "img_size", "batch_size")}
    options |= {
        "seed": seed,
        "device": setting.device,
        "best_metric": "mean_map",
        "tensorboard": False,
    }
    command = ["train_yolo_ddp.py", *words_of(options), *setting.extra]
    wall_s, usage = run_script(command, home / "train.log", home / "usage.json")
    records = read_epochs(folder)
    train_s = sum(record["epoch_time_s"] for record in records)
    epoch_s = statistics.median(record["total_epoch_time_s"] for record in records)
    measured = {
        "best": "run/best.pt",
        "train_s": train_s,
        "epoch_s": epoch_s,
        "epochs": len(records),
        "command": command,
    }
    return {"wall_s": wall_s, **usage, **measured}


def _train_ultralytics(setting: Setting, data: Data, seed: int, start: Path, home: Path) -> Json:
    job = {**vars(setting), "action": "train", "seed": seed, "weights": str(start)}
    place = {"data": str(data.ultralytics_yaml), "folder": str(home.resolve())}
    answer, wall_s, usage = _ultralytics_job({**job, **place}, home, "train")
    return {"wall_s": wall_s, **usage, **answer}


def _ultralytics_job(job: Json, home: Path, name: str) -> tuple[Json, float, Json]:
    """Run benchmarks/ultralytics_job.py in its own process; return (answer, wall time in s,
    memory).
    """
    job_file, answer_file = home / f"{name}-job.json", home / f"{name}-answer.json"
    _write_json(job_file, job)
    command = [str(JOB_SCRIPT), str(job_file.resolve()), str(answer_file.resolve())]
    wall_s, usage = run_script(command, home / f"{name}.log", home / f"{name}-usage.json")
    return _read_json(answer_file), wall_s, usage


def run_script(
    arguments: list[str], log_file: Path, usage_file: Path | None = None
) -> tuple[float, Json]:
    """Run one of the project's scripts; return (wall time in s, memory).

    Raises UserError when it fails.
    """
    usage_file = (usage_file or log_file.with_name(f"{log_file.stem}-usage.json")).resolve()
    script = (PROJECT_FOLDER / arguments[0]).resolve()
    # -P: Python does not search the current folder, which may hold another `yolo_seg_ddp`.
    command = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.measured",
        str(usage_file),
        str(script),
        *arguments[1:],
    ]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    start_s = time.perf_counter()
    with log_file.open("ab") as log:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=log, check=False
        ).returncode
    if code:
        lines = log_file.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )
        raise UserError(
            f"{script.name} failed (code {code}): {last.removeprefix('error: ')}; see {log_file}"
        )
    return time.perf_counter() - start_s, _read_json(usage_file)


def _versions() -> dict[str, str | None]:
    versions = {name: package_version(name) for name in ("torch", "ultralytics")}
    return {**versions, "cpu": cpu_model()}


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _short(options: Json) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]


def _read_json(file: Path) -> Json:
    content: Json = json.loads(file.read_text(encoding="utf-8"))
    return content


def _write_json(file: Path, content: Json) -> None:
    write_text_atomic(file, json.dumps(content, indent=2) + "\n")
