"""Collect learning histories of the source learner for every goal, in several processes.

python collect.py [configs/darkroom.yaml]
"""

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT)] if str(PROJECT) not in sys.path else []

from tqdm import tqdm

from recipes.compressed_ad.histories import write_histories
from recipes.compressed_ad.learner import History, learn
from recipes.compressed_ad.settings import Settings, settings_of_command_line
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import EXIT_DONE, run_script


def main() -> int:
    settings = settings_of_command_line()
    means = []

    def collected() -> Iterator[tuple[int, History]]:
        for goal, history in histories_of(settings):
            episodes = settings.source_steps // settings.horizon
            rewards = history["rewards"][: episodes * settings.horizon].reshape(episodes, -1)
            means.append(rewards.sum(1) / settings.source_streams)
            yield goal, history

    write_histories(settings.data_file, collected())
    curve = sum(means) / len(means)
    print(
        f"{settings.data_file}: {len(means)} goals x {settings.source_streams} histories of "
        f"{settings.source_steps} steps; "
        f"mean return {curve[0]:.1f} in the first episode, {curve[-1]:.1f} in the last"
    )
    return EXIT_DONE


def histories_of(settings: Settings) -> Iterator[tuple[int, History]]:
    """Yield every goal with its histories, in order, with a bar."""
    goals = settings.goals.tolist()
    processes = min(settings.collect_processes, usable_cpu_count())
    job = partial(learn, settings)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from zip(
            goals,
            tqdm(pool.map(job, goals), "Collecting", len(goals), unit="goal", disable=None),
            strict=True,
        )


if __name__ == "__main__":
    run_script(main)
