"""The file of learning histories: HDF5, one group for each goal, named by its number ("0" to "80").

Each group holds `states` and `next_states` int32 (steps, streams, 2), `actions` and `rewards` int32
(steps, streams), `dones` bool (steps, streams).
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from recipes.compressed_ad.learner import History
from recipes.compressed_ad.settings import Settings, same_config
from yolo_seg_ddp.utils.errors import UserError, one_line

NAMES = ("states", "actions", "rewards", "next_states", "dones")


def write_histories(file: Path, histories: Iterable[tuple[int, History]]) -> None:
    """Write goals and their histories; after a kill the file is the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    try:
        with _h5py().File(temporary, "w") as content:
            for goal, history in histories:
                group = content.create_group(str(goal))
                for name in NAMES:
                    group.create_dataset(
                        name, data=history[name], compression="gzip", compression_opts=1
                    )
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def existing_file(config: Settings) -> Path:
    """Return the data file. Raises UserError when it is not there."""
    if not config.data_file.is_file():
        raise UserError(
            f"{config.data_file}: no such file; make it with {same_config('collect.py')}"
        )
    return config.data_file


def read_histories(
    config: Settings, goals: np.ndarray, num_streams: int, num_steps: int
) -> np.ndarray:
    """Return the first streams and steps of the goals: uint8 (goals x streams, steps, 4), see
    `sizes.STEP_FIELDS`.

    Raises UserError when the file is missing, damaged, or holds other goals, streams or steps.
    """
    file = existing_file(config)
    expected = len(config.goals)
    again = same_config("collect.py")
    parts = []
    try:
        with _h5py().File(file, "r") as content:
            if len(content) != expected:
                raise UserError(
                    f"{file}: {len(content)} goals, but the configuration has {expected}; run "
                    f"{again}"
                )
            for goal in goals:
                group = content[str(goal)]
                steps, streams = group["actions"].shape
                if steps < num_steps or streams < num_streams:
                    raise UserError(
                        f"{file}: goal {goal} has {streams} streams of {steps} steps, "
                        f"{num_streams} of {num_steps} are "
                        f"asked for; lower train_streams or train_source_steps, or run {again}"
                    )
                columns = [np.asarray(group[name][:num_steps, :num_streams]) for name in NAMES[:4]]
                parts.append(_packed(columns, config.grid_size))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{file}: not a file of histories ({one_line(error)}); run {again}"
        ) from error
    return np.concatenate(parts)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise UserError(
            "h5py is missing: pip install -r requirements.txt in this folder"
        ) from error
    return h5py


def _packed(columns: list[np.ndarray], grid_size: int) -> np.ndarray:
    states, actions, rewards, next_states = columns
    cells, reached = (
        places[..., 0] * grid_size + places[..., 1] for places in (states, next_states)
    )
    return np.stack([cells, actions, rewards, reached], axis=-1).astype(np.uint8).swapaxes(0, 1)
