"""The parts of the check: their settings, results and outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

OK, FAILED, TOO_SLOW, NEEDS_GPU, NO_TIME = "ok", "FAILED", "TOO SLOW", "needs a GPU", "no time left"
FINISHED = (OK, NEEDS_GPU)  # kept, and not run again
BAD = (FAILED, TOO_SLOW)


class PartFailed(Exception):
    """The check of a part failed. The message says what was found."""

    def __init__(self, message: str, **figures: Any) -> None:
        super().__init__(message)
        self.figures = figures


class NeedsGpu(PartFailed):
    """The part cannot be checked on a CPU.

    The message says what was checked instead, if anything.
    """


@dataclass(frozen=True)
class Finding:
    """The result of a part: one line for the table, and all figures."""

    said: str
    figures: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the parts' work. The dry run on a CPU does the same work in small."""

    photos: int = 240  # of the built-in sample, a fifth of them for validation
    copies: int = 8  # of each training photograph, for a long epoch
    full_px: int = 640
    small_px: int = 320
    tiny_px: int = 160
    compared_px: int = 320  # of the batch that is computed on the CPU too
    batch_size: int = 16
    large_batch: int = 64
    loaded_batch: int = 64
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 384)
    small_model: str = "yolov8n-seg.yaml"
    large_model: str = "yolov8m-seg.yaml"
    epochs: int = 3
    # of fp32's, relative, the mean of the run; bf16 on a CPU: AdamW 0.011, MuSGD 0.038
    loss_within: float = 0.1
    steps: int = 10
    rounds: int = 3
    seconds: float = 2.0  # of each throughput


ON_GPU = Sizes()
ON_CPU = Sizes(
    photos=24,
    copies=1,
    full_px=64,
    small_px=64,
    tiny_px=64,
    compared_px=160,
    batch_size=4,
    large_batch=4,
    loaded_batch=4,
    batch_sizes=(1, 2),
    large_model="yolov8n-seg.yaml",
    epochs=2,
    # Five steps differ by chance.
    loss_within=0.5,
    steps=2,
    rounds=1,
    seconds=0.3,
)


@dataclass(frozen=True)
class Setting:
    """The settings of all parts.

    `folder` is for the files that the parts make; each part has a folder of its own in it.
    """

    device: str  # cuda or cpu
    num_gpus: int
    folder: Path

    @property
    def sizes(self) -> Sizes:
        """The sizes of the work."""
        return ON_GPU if self.is_gpu else ON_CPU

    @property
    def is_gpu(self) -> bool:
        """Whether the parts run on a GPU; else it is the dry run."""
        return self.device == "cuda"

    @property
    def threads(self) -> list[str]:
        """The flag for the scripts' compute threads: the dry run may share its cores, where several
        would wait.
        """
        return [] if self.is_gpu else ["--threads=1"]

    @property
    def patience(self) -> float:
        """The factor for the parts' time limits: the dry run may share its cores with other
        programs.
        """
        return 1.0 if self.is_gpu else 2.0

    @property
    def data(self) -> Path:
        """The data-set YAML that the part `data` writes."""
        return self.folder / "data" / "processed" / "dataset.yaml"


@dataclass(frozen=True)
class Part:
    """One row of the table.

    limit_s: after this time it is ended. needed_s: it is not begun with less time left; about what
    it takes on a GPU. alone: it measures time or takes all memory, so nothing else may run. after:
    parts that must have ended before.
    """

    name: str
    what: str
    run: Callable[[Setting], Finding]
    limit_s: float
    needed_s: float
    alone: bool = False
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part."""

    status: str
    seconds: float = 0.0
    said: str = ""
    figures: Json = field(default_factory=dict)
    is_kept: bool = False  # from an earlier start
