"""Attack the project's trainings and report what they survived.

    python -m chaos                          # everything: an hour on two cores
    python -m chaos --quick --only R1 R6     # a few trials of two scenarios
    python -m chaos --ultralytics            # the same questions put to Ultralytics
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos import kills, saves
from chaos.scenario import HEADER, Result, Scenario, Setting, Skipped, row
from utils.config import option, parse_config
from utils.errors import EXIT_FAILED, UsageError, run_script
from utils.files import write_text_atomic

SCENARIOS = (
    Scenario("R1", "SIGKILL of a random rank, again and again in one job", "exit 0, one restart each, bitwise", kills.random_kills),
    Scenario("R6", "SIGKILL while a checkpoint is saved", "the old or the new one loads, nothing is left over", kills and saves.kills_while_saving),
)


@dataclass(frozen=True)
class ChaosConfig:
    """Options of `python -m chaos`."""

    only: tuple[str, ...] = option((), "scenarios to run; unset: all", metavar="ID")
    quick: bool = option(False, "a few trials of each")
    ultralytics: bool = option(False, "attack Ultralytics' trainer instead")
    seed: int = option(0, "of the moments and the victims")
    minutes: float = option(10.0, "length of the soak (R25)")
    json: str | None = option(None, "where to write the results", metavar="FILE")
    keep: bool = option(False, "keep the folders of the attacked runs")


def main() -> int:
    """Run the scenarios one after another; return 1 when a trial failed."""
    config = parse_config(ChaosConfig, "Attack the project's trainings and report what they survived")
    return EXIT_FAILED


if __name__ == "__main__":
    run_script(main)
