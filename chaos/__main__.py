"""Attack the project's trainings and report which attacks they survive.

python -m chaos                          # all scenarios: most of an hour on two cores
python -m chaos --quick --only R1 R6     # a few trials of two scenarios
python -m chaos --ultralytics            # three similar attacks on Ultralytics' trainer
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos import theirs
from chaos.catalogue import SCENARIOS
from chaos.scenario import HEADER, Result, Scenario, Setting, Skipped, row
from utils.common.config import Options, option, parse_config
from utils.common.environment import environment_report, prepare_environment
from utils.common.errors import EXIT_DONE, EXIT_FAILED, UsageError, run_script
from utils.common.files import write_text_atomic


@dataclass(frozen=True)
class ChaosConfig(Options):
    """Options of `python -m chaos`."""

    only: tuple[str, ...] = option((), "scenarios to run; unset: all", metavar="ID")
    quick: bool = option(False, "only a few trials of each scenario")
    trials: int = option(0, "at most this many trials of each kind; 0: each scenario's own number")
    ultralytics: bool = option(False, "attack Ultralytics' trainer instead")
    seed: int = option(0, "seed of the random moments and victims")
    minutes: float = option(10.0, "length of the soak (R25)")
    json: str | None = option(None, "write the results here", metavar="FILE")
    keep: bool = option(False, "keep the folders of the attacked runs")


def main() -> int:
    """Run the scenarios one after another; return 1 when a trial failed."""
    config = parse_config(ChaosConfig, "Attack the project's trainings and report which attacks they survive")
    prepare_environment()
    known = theirs.SCENARIOS if config.ultralytics else SCENARIOS
    unknown = set(config.only) - {scenario.name for scenario in known}
    if unknown:
        raise UsageError(f"--only {' '.join(sorted(unknown))}: there is {' '.join(entry.name for entry in known)}")
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(HEADER, flush=True)
    results = {}
    try:
        for scenario in known:
            if not config.only or scenario.name in config.only:
                results[scenario.name] = attack(scenario, config, root)
                write_results(config, known, results)
    finally:
        if config.keep:
            print(f"kept in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    return EXIT_FAILED if any(result.failures for result in results.values()) else EXIT_DONE


def attack(scenario: Scenario, config: ChaosConfig, root: Path) -> Result:
    """Run one scenario in its own folder; print its row of the table, then its failures."""
    folder = root / scenario.name
    folder.mkdir()
    start_s = time.monotonic()
    try:
        result = scenario.attack(Setting(folder, config.quick, config.seed, config.minutes, config.trials))
    except Skipped as reason:
        result = Result(skipped=str(reason))
    except Exception:  # noqa: BLE001 # it counts as failed, and the other scenarios still run
        result = Result()
        result.trial("the scenario", traceback.format_exc())
    result.figures["seconds"] = round(time.monotonic() - start_s)
    print(row(scenario, result), *(f"  {failure}" for failure in result.failures), sep="\n", flush=True)
    return result


def write_results(config: ChaosConfig, known: tuple[Scenario, ...], results: dict[str, Result]) -> None:
    """Write all results so far, so that an interrupted run keeps them."""
    if config.json is None:
        return
    entries = [
        {**asdict(results[entry.name]), "passes": results[entry.name].passes, "id": entry.name, "what": entry.what}
        for entry in known
        if entry.name in results
    ]
    content = {"environment": environment_report(), "quick": config.quick, "seed": config.seed, "results": entries}
    Path(config.json).parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(Path(config.json), json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    # SIGTERM becomes SystemExit, so that every running job is killed before the suite exits.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run_script(main)
