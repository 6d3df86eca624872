"""The options of collect.py, train.py and evaluate.py, from a YAML file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.compressed_ad.environment import ROOMS, Darkroom
from recipes.compressed_ad.sizes import ModelSize
from yolo_seg_ddp.utils.config import read_config
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.options import FRACTION, option

DEFAULT_CONFIG = "configs/darkroom.yaml"
PRECISIONS = ("no", "fp16", "bf16")  # Accelerate's words


@dataclass(frozen=True)
class Settings(ModelSize):
    """All options; README.md explains them."""

    # configs/env
    environment: str = option("darkroom", "the room", choices=tuple(ROOMS))
    num_goals: int = option(0, "goals, drawn from all; 0: all", at_least=0)
    horizon: int = option(20, "steps of an episode", at_least=1, may_differ=True)
    env_split_seed: int = option(0, "seed of the split into training and test goals", at_least=0)
    # configs/algorithm
    algorithm: str = option("TabularQ", "name in the data file's name", may_differ=True)
    alg_seed: int = option(42, "seed of the learners", at_least=0)
    history_dir: str = option("datasets", "folder of the data file", may_differ=True)
    discount: float = option(
        0.9, "of the learners; a stay on the goal is worth 1 / (1 - discount)", above=0, below=1
    )
    optimism: float = option(
        0.4, "value of an unknown cell, as a share of a stay on the goal", **FRACTION
    )
    planning_sweeps: int = option(4, "of value iteration after each step", at_least=0)
    first_randomness: float = option(
        0.2, "share of random actions at the start of a history", **FRACTION
    )
    last_randomness: float = option(0.02, "the same from the middle of a history on", **FRACTION)
    source_streams: int = option(100, "learners for each goal", at_least=1)
    source_steps: int = option(1000, "steps of each learner", at_least=1)
    collect_processes: int = option(
        8, "most processes that collect; fewer where cores are few", at_least=1
    )
    # training
    train_streams: int = option(100, "histories used of each training goal", at_least=1)
    test_streams: int = option(1, "histories used of each test goal", at_least=1)
    train_source_steps: int = option(1000, "steps used of each history", at_least=1)
    train_timesteps: int = option(150_000, "optimizer steps", at_least=1, may_differ=True)
    train_batch_size: int = option(
        128, "records per process and batch", at_least=1, may_differ=True
    )
    test_batch_size: int = option(256, "the same in the test", at_least=1, may_differ=True)
    gradient_accumulation_steps: int = option(
        1, "batches per optimizer step", at_least=1, may_differ=True
    )
    lr: float = option(1e-4, "highest learning rate", above=0)
    warmup_steps: int = option(5000, "optimizer steps until it is reached", at_least=0)
    weight_decay: float = option(0.01, "of AdamW", at_least=0)
    clip_norm: float = option(1.0, "the gradient's largest norm", above=0)
    mixed_precision: str | None = option(
        "fp16",
        "fp16, bf16 or no; empty: the launcher's --mixed_precision",
        choices=PRECISIONS,
        may_differ=True,
    )
    summary_interval: int = option(
        100, "optimizer steps between two log lines", at_least=1, may_differ=True
    )
    eval_interval: int = option(1000, "optimizer steps between two tests", at_least=1)
    ckpt_interval: int = option(
        1000, "optimizer steps between two checkpoints", at_least=1, may_differ=True
    )
    seed: int = option(0, "of weights, order and dropout", at_least=0)
    save_dir: str = option("runs", "folder of all runs", may_differ=True)
    # evaluate.py
    eval_episodes: int = option(500, "episodes in context", at_least=1, may_differ=True)
    eval_rollouts: int = option(4, "rollouts for each test goal", at_least=1, may_differ=True)
    eval_recent: int = option(
        80, "steps in context, at which the oldest are compressed", at_least=1, may_differ=True
    )
    eval_segment: int = option(60, "how many are compressed at once", at_least=1, may_differ=True)

    def __getitem__(self, name: str) -> Any:
        """Return the option `name`: the guide writes `config['mixed_precision']`.

        Raises KeyError for another name.
        """
        return vars(self)[name]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise UsageError(f"--width {self.width}: must be a multiple of heads, {self.heads}")
        if 0 < self.num_goals < 5:
            raise UsageError(
                f"--num-goals {self.num_goals}: must be 0 (all) or at least 5; a tenth are for "
                "the test"
            )
        if self.train_timesteps % self.eval_interval:
            raise UsageError(
                f"--train-timesteps {self.train_timesteps}: must be a multiple of eval_interval, "
                f"{self.eval_interval}"
            )
        if not self.eval_segment <= self.eval_recent <= self.max_recent:
            raise UsageError(
                f"--eval-recent {self.eval_recent}: must be at least eval_segment, "
                f"{self.eval_segment}, and at most {self.max_recent}"
            )

    @property
    def resume(self) -> None:
        """A run resumes by itself."""
        return

    @property
    def room(self) -> type[Darkroom]:
        """The environment."""
        return ROOMS[self.environment]

    @property
    def goals(self) -> np.ndarray:
        """All goals of the data file, in order."""
        goals = self.room.all_goals(self.grid_size)
        order = np.random.default_rng(self.alg_seed).permutation(goals)
        return np.sort(order[: self.num_goals]) if self.num_goals else goals

    @property
    def model_name(self) -> str:
        """AD is the baseline, which compresses nothing."""
        return "CompressedAD" if self.encoder_layers else "AD"

    @property
    def run_folder(self) -> Path:
        """The folder of checkpoints and logs."""
        return Path(self.save_dir) / f"{self.model_name}-{self.environment}-seed{self.seed}"

    @property
    def data_file(self) -> Path:
        """The histories."""
        return (
            Path(self.history_dir)
            / f"history_{self.environment}_{self.algorithm}_alg-seed{self.alg_seed}.hdf5"
        )


def settings_of_command_line() -> Settings:
    """Read the YAML file that is the command's only argument, by default configs/darkroom.yaml
    beside this file.
    """
    script, *arguments = sys.argv
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        raise UsageError(
            f"{Path(script).name} takes no flags, only a YAML file: python {Path(script).name} "
            f"{DEFAULT_CONFIG}"
        )
    return read_config(
        Settings, Path(arguments[0]) if arguments else Path(__file__).parent / DEFAULT_CONFIG
    )


def same_config(script: str) -> str:
    """Return the command that runs another script with this command's YAML file."""
    return " ".join(["python", script, *sys.argv[1:]])
