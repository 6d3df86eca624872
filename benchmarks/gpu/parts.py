"""The table of parts, the most important ones first. Parts that measure run alone, after the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.gpu import checks, speed, steps, throughput, trainings
from benchmarks.gpu.plan import Part

DATA = ("data",)
PARTS: tuple[Part, ...] = (
    Part("data", "the built-in sample for the other parts", checks.make_data, 120, 20),
    Part("machine", "test_ddp.py finds nothing wrong", checks.check_machine, 150, 15, after=DATA),
    Part(
        "deterministic",
        "--deterministic: equal runs, and runs killed or stopped and resumed, end with equal bits",
        trainings.compare_deterministic_runs,
        280,
        60,
        after=DATA,
    ),
    Part(
        "precision_musgd",
        "MuSGD in bf16 and fp16: finite weights, fp32's loss within 5 %, no steps skipped after the first",
        trainings.train_with_musgd,
        200,
        40,
        after=DATA,
    ),
    Part("precision_adamw", "the same with AdamW", trainings.train_with_adamw, 200, 40, after=DATA),
    Part("nccl", "every collective and DDP over NCCL on all GPUs; equal weights", checks.check_nccl, 290, 30),
    Part(
        "launcher", "train_ddp.sh: one process per GPU, over NCCL", trainings.train_with_launcher, 200, 30, after=DATA
    ),
    Part("two_ranks", "two ranks share a GPU, over gloo; equal weights", checks.check_two_ranks, 290, 30),
    Part("tests", "the tests marked gpu", checks.run_gpu_tests, 280, 60),
    Part(
        "default",
        "without --deterministic: killed and stopped runs resume and finish; equal bits or not",
        trainings.compare_default_runs,
        280,
        60,
        after=DATA,
    ),
    Part(
        "out_of_memory",
        "a batch that is too large ends with one line and a non-zero code",
        checks.exhaust_memory,
        200,
        30,
        alone=True,
        after=DATA,
    ),
    Part(
        "profile", "yolov8m: speed and memory by batch size, and the GPU's limits", speed.profile, 150, 60, alone=True
    ),
    Part(
        "train_step_n",
        "a step of yolov8n against Ultralytics', and with our loader",
        speed.step_of_small_model,
        90,
        25,
        alone=True,
        after=DATA,
    ),
    Part("train_step_m", "the same of yolov8m, one batch", speed.step_of_large_model, 90, 25, alone=True),
    Part("operators", "operators, kernels and host waits of a step", steps.look_at_steps, 90, 20, alone=True),
    Part(
        "loader_m",
        "yolov8m: is a training bound by the loader?",
        speed.loading_of_large_model,
        120,
        30,
        alone=True,
        after=DATA,
    ),
    Part(
        "inference",
        "images/s of the network, and from photographs to masks",
        throughput.inference,
        60,
        15,
        alone=True,
        after=("precision_musgd",),
    ),
    Part(
        "evaluation",
        "images/s of an evaluation",
        throughput.evaluation,
        90,
        20,
        alone=True,
        after=("precision_musgd",),
    ),
    Part(
        "vs_ultralytics",
        "the same short training with both, Ultralytics with AMP",
        speed.against_ultralytics,
        180,
        50,
        alone=True,
        after=DATA,
    ),
    Part("options", "ms per step by precision and --deterministic", steps.cost_of_options, 90, 20, alone=True),
    Part(
        "loader_n",
        "yolov8n: is a training bound by the loader?",
        speed.loading_of_small_model,
        120,
        30,
        alone=True,
        after=DATA,
    ),
)


def with_needed(names: Iterable[str], parts: Sequence[Part] = PARTS) -> tuple[Part, ...]:
    """Return the named parts and those that they wait for, in the order of the table."""
    wanted = set(names)
    for part in reversed(parts):  # a part waits only for earlier ones
        if part.name in wanted:
            wanted.update(part.after)
    return tuple(part for part in parts if part.name in wanted)
