"""The commands whose options are walked: how each is run on paper (tests/support/option_walk.py)."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

from recipes.compressed_ad.learner import Learner
from recipes.compressed_ad.sizes import ModelSize
from utils.common.config import section_of
from utils.common.errors import UsageError, UserError
from utils.data.augment import Augmentation
from utils.measure.scaling import process_counts
from utils.pages.report import Viewer
from utils.predict.tiles import Tiling, check_tiles, choose_tiling
from utils.training.config import TrainConfig


def tiling(tiles: str, overlap: float, *_: object) -> Tiling | None:
    """Choose the tiling of a model that was trained on windows."""
    model = SimpleNamespace(args={"windows": {"per_photo": 1, "low_scale": 0.5, "high_scale": 1.0}})
    return choose_tiling(tiles, overlap, model, 640)  # type: ignore[arg-type]


PHOTOGRAPHS = {"is_orthophoto": lambda _: False}
TILING = {"choose_tiling": tiling, "check_tiles": check_tiles}
TILES = {"tiles": ("320", "off")}


@dataclass(frozen=True)
class Script:
    """A command, and what the walk has to know about it.

    flags: always given. modes: further ones to walk. values: of options, instead of those that the walk thinks of; one
    that differs from the default comes first. kept: what stands for a name of the script's module; stubs: names that
    become Things although they are defined there. tested: attributes on which the code branches, with their values.
    elsewhere: options that act only in another of the command's entries.
    """

    module: str
    options: str
    flags: tuple[str, ...] = ()
    home: str = ""  # where the options are declared
    real: tuple[str, ...] = ()  # further modules that take the options
    modes: tuple[tuple[str, ...], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    stubs: tuple[str, ...] = ()
    tested: Mapping[str, Any] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home or self.module)

    def __str__(self) -> str:
        return self.module + " ".join(("", *self.flags))


def need_one(variants: list[Any], _: object) -> None:
    """Stand for `check_variants`, which also asks what is installed."""
    if not variants:
        raise UsageError("--no-fp32 alone")


def wait(seconds: float) -> None:
    """End the monitor's endless loop."""
    raise UserError(f"waits {seconds} s")


STUDENT = "underwater_ir.student.train_student"
SCRIPTS = [
    Script(
        "train_yolo_ddp",
        "TrainConfig",
        home="utils.training.config",
        real=(
            "utils.commands.training",
            *(f"utils.training.{name}" for name in ("assembly", "data", "plan", "regime")),
        ),
        values={"window_scale": ((0.25, 1.0),), "mlflow": ("https://host",)},
        readers={"OwnedRun": ("save_dir", "accept_changed_data")},
        kept={
            **{section.__name__: section for section in TrainConfig.__mro__[1:-1]},
            "section_of": section_of,
            "Augmentation": Augmentation,
        },
        tested={"are_all_thin": False},
    ),
    Script(
        "inference",
        "InferenceConfig",
        ("--model=m", "--source=s"),
        real=("utils.predict.options",),
        stubs=("named_classes",),
        values=TILES,
        kept=TILING | PHOTOGRAPHS,
    ),
    Script(
        "inference",
        "InferenceConfig",
        ("--model=m", "--source=map.tif"),
        real=("utils.predict.options",),
        stubs=("named_classes",),
        values=TILES,
        kept=TILING | {"is_orthophoto": lambda _: True},
        elsewhere=(
            *("geo", "assets", "asset_range", "before", "ground_height", "ground_sigma"),
            *("save_coco", "save_crops", "save_label_studio", "thresholds"),
        ),
    ),
    Script(
        "evaluate_model",
        "EvaluationConfig",
        ("--model=m",),
        home="utils.commands.evaluation",
        real=("utils.commands.evaluation",),
        values=TILES,
        kept=TILING | {"Viewer": Viewer},
    ),
    Script(
        "export",
        "ExportConfig",
        ("--model=m",),
        values={**TILES, "max_images": (2,), "calibration_images": (2,)},
        kept={**TILING, "check_variants": need_one},
    ),
    Script("profile_gpu", "ProfileConfig"),
    Script(
        "benchmark_ddp",
        "BenchmarkConfig",
        values={"processes": ((2,), (4,)), "device": ("cpu",)},
        kept={"process_counts": process_counts, "usable_cpu_count": lambda: 8, "visible_gpu_count": lambda: 4},
    ),
    Script("download_data", "DownloadConfig", stubs=("utils.sources.sample.write_sample",)),
    Script("parse_labels", "ParseConfig", kept=PHOTOGRAPHS),
    Script("test_ddp", "MachineCheckConfig"),
    Script(
        "utils.run.monitor",
        "MonitorConfig",
        ("--run=r",),
        kept={"RUNNING": ANY, "time": SimpleNamespace(time=int, sleep=wait)},
    ),
    Script(
        "crowd_bt.train",
        "TrainConfig",
        home="crowd_bt.options",
        real=("crowd_bt.options",),
        readers={"prepare_from_s3": ("s3_bucket", "s3_prefix", "prepared_folder", "seed")},
        tested={"measured": {"an annotator": None}},
        # They fill gaps of the environment: tests/recipes/crowd_bt/test_commands.py.
        elsewhere=("local_rank", "world_size"),
    ),
    Script("crowd_bt.evaluate", "EvaluateConfig"),
    Script(
        "crowd_bt.infer",
        "InferConfig",
        modes=(("--image=i",), ("--image-dir=d",), ("--compare", "a", "b")),
        values={"compare": [("c", "d")]},
        stubs=("scores_of", "compared", "ranked"),
    ),
    Script(
        "crowd_bt.make_data",
        "MakeConfig",
        ("--per-annotator=10",),
        values={"per_annotator": (12,)},
        kept={"included_photographs": lambda: [("name", "picture")] * 3},
        stubs=("write_pictures", "write_lists", "sides", "random_pairs"),
    ),
    Script("distributed_training_example", "ExampleConfig", stubs=("load_datasets",)),
    Script(
        STUDENT,
        "StudentConfig",
        modes=(
            ("--ddp", "--world-size=8"),
            tuple(f"--pseudo-{name}-root=labels" for name in ("train", "val-ref", "val-nonref")),
        ),
        tested={"world_size": 1},
        elsewhere=("backend",),
    ),
    Script(
        STUDENT,
        "StudentConfig",
        ("--ddp",),
        values={"backend": ("gloo",)},
        tested={"type": "cuda", "world_size": 2},
        only=("backend",),
    ),
    Script("underwater_ir.commands.evaluate", "EvaluateConfig", stubs=("write_sheets",)),
    Script("underwater_ir.commands.export_pseudo_labels", "ExportConfig"),
    Script("underwater_ir.commands.make_data", "DataConfig", stubs=("split",)),
    Script("underwater_ir.commands.measure_memory", "MemoryConfig", stubs=("step_bytes",)),
    Script("underwater_ir.commands.restore", "RestoreConfig", ("--source=s",)),
]
COMPRESSED_AD = [
    Script(
        f"recipes.compressed_ad.{name}",
        "Settings",
        home="recipes.compressed_ad.settings",
        readers={"start": ("mixed_precision", "gradient_accumulation_steps")},
        real=("recipes.compressed_ad.settings", "recipes.compressed_ad.distillation"),
        values={
            "train_timesteps": (300_000,),
            "eval_interval": (500,),
            "width": (64,),
            "heads": (4,),
            "eval_recent": (70,),
            "eval_segment": (30,),
        },
        kept={
            "section_of": section_of,
            "Learner": Learner,
            "ModelSize": ModelSize,
            "PRECISIONS": defaultdict(lambda: "off"),
            "write_histories": lambda _, histories: list(histories),
            "tqdm": lambda found, _, total, **more: [found] * total,
        },
    )
    for name in ("collect", "train", "evaluate")
]
