"""Options of `profile_gpu.py` and `benchmark_ddp.py`."""

from dataclasses import dataclass

from yolo_seg_ddp.utils.options import CONFIG_HELP, INPUT_SIZE, PRECISION_CHOICES, Options, option

MAX_CPU_PROCESSES = 8


@dataclass(frozen=True)
class ProfileConfig(Options):
    """Options of `profile_gpu.py`."""

    model: str = option(
        "yolov8m-seg.pt",
        "model to train: a .pt file, or yolov8, yolo11, yolo12 or yolo26{n,s,m,l,x}-seg.yaml",
    )
    batch_sizes: tuple[int, ...] = option(
        (4, 8, 16, 32, 64), "batch sizes to try, in ascending order", metavar="N", at_least=1
    )
    img_size: int = option(
        640, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE
    )
    steps: int | None = option(
        None, "training steps measured per batch size; unset: 20 on a GPU, 4 on a CPU", at_least=1
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = option(
        None, "compute threads; unset: as many as the trainer uses", at_least=1
    )
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")
    trace: bool = option(
        False,
        "also write trace.json: steps at the best batch size, for chrome://tracing or Perfetto",
    )
    output: str = option("outputs/profiling", "folder for the results", metavar="DIR")


@dataclass(frozen=True)
class BenchmarkConfig(Options):
    """Options of `benchmark_ddp.py`."""

    model: str = option("yolov8n-seg.yaml", "model to train; its weights do not matter")
    batch_size: int = option(16, "images per process", at_least=1)
    img_size: int | None = option(
        None,
        "side of the square network input in pixels, a multiple of 32; unset: 640 on GPUs, 256 on "
        "a CPU",
        **INPUT_SIZE,
    )
    data: str | None = option(
        None, "data-set YAML: train on it with the trainer's loader", metavar="YAML"
    )
    num_workers: int | None = option(
        None,
        "loader processes per rank with --data; unset: as many as the trainer uses",
        at_least=0,
        needs="data",
    )
    steps: int | None = option(
        None, "training steps measured per run; unset: 20 on GPUs, 6 on a CPU", at_least=1
    )
    repeats: int = option(3, "how often every process count is measured", at_least=1)
    processes: tuple[int, ...] | None = option(
        None,
        "process counts; unset: 1 2 4 ... up to the GPUs, or up to the cores, at most "
        f"{MAX_CPU_PROCESSES}",
        at_least=1,
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    timeout_s: float = option(
        600.0, "time limit of one run in seconds", metavar="SECONDS", at_least=1
    )
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")
    output: str = option("outputs/benchmarks", "folder for the results", metavar="DIR")
