"""What one attack is, what came of it, and how results are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Figure = float | int | str


class Skipped(Exception):  # the means are missing, nothing failed
    """A scenario cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How much to do: `quick` is a few trials each. `folder` is the scenario's own, empty."""

    folder: Path
    quick: bool = False
    seed: int = 0
    minutes: float = 10.0
    most_trials: int = 0  # 0: as many as each scenario wants

    def count(self, full: int, quick: int) -> int:
        """Return the number of trials."""
        wanted = quick if self.quick else full
        return min(wanted, self.most_trials) if self.most_trials else wanted


@dataclass
class Result:
    """Trials, how many passed, and what was measured. Each failure is one line."""

    trials: int = 0
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    skipped: str = ""

    @property
    def passes(self) -> int:
        """Trials without a failure; a failed trial may have left several lines, but counts once."""
        return self.trials - len({line.split(":")[0] for line in self.failures})

    def trial(self, name: str, *problems: str) -> None:
        """Count one trial, failed when any of `problems` is not empty."""
        self.trials += 1
        name = f"{self.trials} {name}".replace(":", "")
        self.failures += [f"{name}: {problem}" for problem in problems if problem]


@dataclass(frozen=True)
class Scenario:
    """One attack; `attack(setting)` makes its trials."""

    name: str
    what: str
    criterion: str
    attack: Callable[[Setting], Result]


def spread(values: list[float], unit: str = "s") -> str:
    """Return the median and the largest of some measurements as text."""
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
