"""Scenarios, their settings and results, and the table of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Figure = float | int | str


class Skipped(Exception):  # no Error in the name: nothing failed
    """A scenario cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How to run a scenario. `folder` is its own, and empty; `quick` means a few trials; `minutes` is the soak's length."""

    folder: Path
    quick: bool = False
    seed: int = 0
    minutes: float = 10.0
    max_trials: int = 0  # 0: no limit

    def count(self, full: int, quick: int) -> int:
        """Return the number of trials: `full` or `quick`, at most `max_trials`."""
        wanted = quick if self.quick else full
        return min(wanted, self.max_trials) if self.max_trials else wanted


@dataclass
class Result:
    """A scenario's trials, its failures (one line each) and what it measured."""

    trials: int = 0
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: str = ""

    @property
    def passes(self) -> int:
        """Number of trials without a failure. A trial with several failures counts once."""
        return self.trials - len({line.split(":")[0] for line in self.failures})

    def trial(self, name: str, *problems: str) -> None:
        """Count one trial; each of `problems` that is not empty is a failure."""
        self.trials += 1
        name = f"{self.trials} {name}".replace(":", "")
        self.failures += [f"{name}: {problem}" for problem in problems if problem]


@dataclass(frozen=True)
class Scenario:
    """One attack; `attack(setting)` runs its trials."""

    name: str
    what: str
    criterion: str
    attack: Callable[[Setting], Result]


def spread(values: list[float], unit: str = "s") -> str:
    """Return the median and the maximum of some values as text."""
    if not values:
        return "none"
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.1f} {unit} (most {ordered[-1]:.1f})"


def row(scenario: Scenario, result: Result) -> str:
    """Return one line of a Markdown table."""
    figures = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.figures.items()
    )
    verdict = f"skipped: {result.skipped}" if result.skipped else f"{result.passes}/{result.trials}"
    return f"| {scenario.name} | {scenario.what} | {scenario.criterion} | {verdict} | {figures} |"


HEADER = "| id | what | criterion | passed/trials | figures |\n|---|---|---|---|---|"
