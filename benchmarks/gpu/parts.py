"""The table of parts, the most important ones first. Parts that measure run alone.
docs/research/gpu.md says more.

`python -m benchmarks.gpu.parts NAME SETTING.json ANSWER.json` runs a part in a process of its own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.gpu import against_cpu, checks, speed, steps, throughput, trainings
from benchmarks.gpu.plan import FAILED, NEEDS_GPU, OK, NeedsGpu, Outcome, Part, PartFailed, Setting
from benchmarks.jobs import TooSlow
from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.utils.errors import UserError, one_line
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.signals import die_with_parent

DATA = ("data",)
TRAINED = ("precision_musgd",)
PRECISION = "finite weights in bf16 and fp16, fp32's loss, no steps skipped after the first"
PARTS: tuple[Part, ...] = (
    Part(
        "same_as_cpu", "a batch gives what the CPU computes", against_cpu.compare_with_cpu, 200, 30
    ),
    Part("data", "the built-in sample for the other parts", checks.make_data, 120, 20),
    Part(
        "nccl",
        "collectives, DDP and synchronised BatchNorm over NCCL on all GPUs",
        checks.check_nccl,
        290,
        30,
    ),
    Part("machine", "test_ddp.py finds nothing wrong", checks.check_machine, 150, 15, after=DATA),
    Part(
        "precision_musgd",
        PRECISION,
        partial(trainings.compare_precisions, "musgd"),
        200,
        40,
        after=DATA,
    ),
    Part(
        "deterministic",
        "equal runs end with equal bits",
        trainings.compare_deterministic_runs,
        280,
        60,
        after=DATA,
    ),
    Part(
        "precision_adamw",
        PRECISION,
        partial(trainings.compare_precisions, "adamw"),
        200,
        40,
        after=DATA,
    ),
    Part(
        "variants",
        "accumulation, multi-scale, YOLO11, YOLO26",
        trainings.train_variants,
        200,
        40,
        after=DATA,
    ),
    Part(
        "launcher",
        "train_ddp.sh: one process per GPU",
        trainings.train_with_launcher,
        200,
        30,
        after=DATA,
    ),
    Part("two_ranks", "two ranks share a GPU, over gloo", checks.check_two_ranks, 290, 30),
    Part("tests", "the tests marked gpu", checks.run_gpu_tests, 280, 60),
    Part(
        "default",
        "the same without --deterministic",
        trainings.compare_default_runs,
        280,
        60,
        after=DATA,
    ),
    Part(
        "train_step_n",
        "a step of yolov8n with both",
        partial(speed.compare_steps, "n"),
        90,
        40,
        True,
        DATA,
    ),
    Part("profile", "yolov8m: speed and memory by batch size", speed.profile, 200, 120, True),
    Part("operators", "kernels and host waits; a trace", steps.look_at_steps, 90, 45, True),
    Part(
        "loader",
        "does the loader keep up, with 8 processes and more?",
        speed.loading,
        200,
        100,
        True,
        DATA,
    ),
    Part(
        "train_step_m",
        "a step of yolov8m with both",
        partial(speed.compare_steps, "m"),
        90,
        45,
        True,
    ),
    Part(
        "options",
        "ms per step of precisions, options and models",
        steps.cost_of_options,
        150,
        75,
        True,
    ),
    Part(
        "inference",
        "images/s of the network, and to masks",
        throughput.inference,
        60,
        40,
        True,
        TRAINED,
    ),
    Part("evaluation", "images/s of an evaluation", throughput.evaluation, 90, 20, True, TRAINED),
    Part(
        "out_of_memory",
        "a batch too large ends with one line",
        checks.exhaust_memory,
        200,
        60,
        True,
        DATA,
    ),
    Part("compile", "ms per step with --compile", steps.cost_of_compiling, 180, 60, True),
    Part(
        "vs_ultralytics",
        "the same short training with both",
        speed.against_ultralytics,
        300,
        180,
        True,
        DATA,
    ),
)


def with_needed(names: Iterable[str], parts: Sequence[Part] = PARTS) -> tuple[Part, ...]:
    """Return the named parts and those that they wait for, in the order of the table."""
    wanted = set(names)
    # A part waits only for earlier ones.
    for part in reversed(parts):
        if part.name in wanted:
            wanted.update(part.after)
    return tuple(part for part in parts if part.name in wanted)


def main() -> None:
    """Run the part that the command line names, and write how it ended."""
    name, setting_file, answer_file = sys.argv[1:]
    die_with_parent(only_under_torchrun=False)
    prepare_environment()
    content = json.loads(Path(setting_file).read_text(encoding="utf-8"))
    (part,) = [part for part in PARTS if part.name == name]
    outcome = outcome_of(part, Setting(**{**content, "folder": Path(content["folder"])}))
    write_text_atomic(Path(answer_file), json.dumps(asdict(outcome)))


def outcome_of(part: Part, setting: Setting) -> Outcome:
    """Run a part here and return how it ended.

    An error's traceback goes to stderr, which is the part's log.
    """
    try:
        finding = part.run(setting)
    except PartFailed as error:
        return Outcome(
            NEEDS_GPU if isinstance(error, NeedsGpu) else FAILED,
            said=str(error),
            figures=error.figures,
        )
    except (TooSlow, UserError) as error:
        return Outcome(FAILED, said=one_line(error, 600))
    except Exception as error:  # noqa: BLE001 # it counts as failed, and the other parts still run
        traceback.print_exc()
        return Outcome(FAILED, said=f"{type(error).__name__}: {one_line(error, 600)}")
    return Outcome(OK, said=finding.said, figures=finding.figures)


if __name__ == "__main__":
    main()
