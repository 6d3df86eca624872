"""Evaluate in context: let the trained model act for many episodes with each test goal, and draw
its returns.

    python evaluate.py [configs/darkroom.yaml]

It writes eval_result.npy, float64 (goals, episodes), and eval_returns.png into the run's folder.
"""

import io
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT)] if str(PROJECT) not in sys.path else []

import numpy as np
import torch

from recipes.compressed_ad.environment import split_goals
from recipes.compressed_ad.histories import read_histories
from recipes.compressed_ad.model import CompressedAD
from recipes.compressed_ad.rollout import random_returns, roll_out
from recipes.compressed_ad.settings import Settings, same_config, settings_of_command_line
from recipes.compressed_ad.sizes import ModelSize
from yolo_seg_ddp.pages.figures import figure_color, new_figure, save_figure
from yolo_seg_ddp.run.checkpoint import CheckpointFiles
from yolo_seg_ddp.utils.errors import EXIT_DONE, UserError, one_line, run_script
from yolo_seg_ddp.utils.files import write_bytes_atomic
from yolo_seg_ddp.utils.options import section_of

RESULT_FILE, PICTURE_FILE = "eval_result.npy", "eval_returns.png"


def main() -> int:
    config = settings_of_command_line()
    # A step's few tokens do not keep more threads busy.
    torch.set_num_threads(1)
    model, step = trained_model(config)
    start_s = time.perf_counter()
    curves = returns_of_all(config, model)
    ours = curves[config.model_name]
    _save(config, curves)
    first = ours[:, 0]
    last = ours[:, -5:].mean(1)
    print(
        f"{config.run_folder}, step {step}: {len(ours)} test goals x {config.eval_rollouts} "
        f"rollouts x {config.eval_episodes} episodes in {time.perf_counter() - start_s:.0f} s"
    )
    for name, values in curves.items():
        numbers = " ".join(f"{value:.1f}" for value in values.mean(0)[_shown(values.shape[1])])
        print(f"  {name:14} {numbers}")
    print(
        f"  mean return {first.mean():.2f} (deviation {first.std():.2f} over goals) in the first "
        f"episode, {last.mean():.2f} ({last.std():.2f}) in the last five"
    )
    print(f"{config.run_folder / RESULT_FILE}, {PICTURE_FILE}")
    return EXIT_DONE


def trained_model(config: Settings) -> tuple[CompressedAD, int]:
    """Return the model of the run's newest checkpoint, and its step."""
    newest = CheckpointFiles(config.run_folder).load()
    if newest is None:
        raise UserError(
            f"{config.run_folder}: no ckpt-<step>.pt; train first with {same_config('train.py')}"
        )
    path, saved = newest
    model = CompressedAD(section_of(config, ModelSize))
    try:
        model.load_state_dict(saved["model"])
        return model, int(saved["step"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise UserError(
            f"{path}: another model than in this configuration ({one_line(error)})"
        ) from error


def returns_of_all(config: Settings, model: CompressedAD) -> dict[str, np.ndarray]:
    """Return the returns (goals, episodes) of the model, of the source learner's histories and of
    random actions.
    """
    _, goals = split_goals(config.goals, config.env_split_seed)
    streams = config.source_streams
    steps = config.source_steps // config.horizon * config.horizon
    source = read_histories(config, goals, streams, steps)[..., 2]
    source = (
        source.reshape(len(goals), streams, -1, config.horizon)
        .sum(3)
        .mean(1)[:, : config.eval_episodes]
    )
    everywhere = np.repeat(goals, config.eval_rollouts)
    rooms = [config.room(everywhere, config.grid_size, config.horizon) for _ in range(2)]
    policy = {
        "most_recent": config.eval_recent,
        "segment": config.eval_segment,
        "seed": config.seed,
    }
    ours = roll_out(model, rooms[0], config.eval_episodes, **policy)
    chance = random_returns(rooms[1], config.eval_episodes, config.seed)
    by_goal = (len(goals), config.eval_rollouts, -1)
    return {
        config.model_name: ours.reshape(by_goal).mean(1),
        "source learner": source,
        "random actions": chance.reshape(by_goal).mean(1),
    }


def _shown(num_episodes: int) -> list[int]:
    """Return the episodes that are printed: the first few, then fewer."""
    return [
        number - 1
        for number in (1, 2, 4, 6, 8, 10, 15, 20, 30, 40, 50, 100, 200, 500)
        if number <= num_episodes
    ]


def _save(config: Settings, curves: dict[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, curves[config.model_name])
    write_bytes_atomic(config.run_folder / RESULT_FILE, buffer.getvalue())
    figure, (axes,) = new_figure(1, 1, cell_width=6.4, cell_height=4)
    for number, (name, values) in zip((4, 5, 2), curves.items(), strict=False):
        episodes = np.arange(1, values.shape[1] + 1)
        mean = values.mean(0)
        error = values.std(0) / np.sqrt(len(values))
        axes.plot(episodes, mean, color=figure_color(number), label=name)
        axes.fill_between(
            episodes, mean - error, mean + error, color=figure_color(number), alpha=0.2, linewidth=0
        )
    axes.set(
        title="Test goals: mean, and its standard error over goals",
        xlabel="episode in context",
        ylabel="return",
        ylim=(0, None),
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, config.run_folder / PICTURE_FILE)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run_script(main)
