"""Small rooms, histories and options for the tests of the recipe."""

from pathlib import Path
from typing import Any

from recipes.compressed_ad.histories import write_histories
from recipes.compressed_ad.learner import learn
from recipes.compressed_ad.settings import Settings

NUM_STEPS = 8  # of a training: two epochs of four


def small_settings(folder: Path, **changes: Any) -> Settings:
    """Return options for rooms of 3 x 3 cells and a network that trains within a second."""
    room = {"grid_size": 3, "horizon": 5, "source_streams": 2, "source_steps": 270}
    network = {
        "width": 16,
        "heads": 2,
        "feedforward": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "latents": 3,
    }
    data = {
        "train_streams": 2,
        "train_source_steps": 265,
        "train_batch_size": 4,
        "test_batch_size": 16,
    }
    steps = {
        "train_timesteps": NUM_STEPS,
        "warmup_steps": 2,
        "summary_interval": 2,
        "eval_interval": 4,
    }
    rest = {"ckpt_interval": 2, "eval_episodes": 20, "eval_rollouts": 2, "lr": 1e-3}
    places = {"history_dir": str(folder / "data"), "save_dir": str(folder / "runs")}
    options: dict[str, Any] = {**room, **network, **data, **steps, **rest, **places, **changes}
    return Settings(**options)


def write_small_histories(settings: Settings) -> None:
    write_histories(settings.data_file, ((goal, learn(settings, goal)) for goal in settings.goals))
