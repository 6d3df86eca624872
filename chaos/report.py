"""Repeat trials and count those that pass. A trial returns its figures and raises ScenarioFailed when it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from chaos.machines import ScenarioFailed

Trial = Callable[[], dict[str, Any]]


def run_trials(name: str, what: str, trials: int, trial_of: dict[str, Trial], skipped: str = "") -> dict[str, Any]:
    """Run each named trial `trials` times and return a report. `skipped` is the reason to run none, if there is one."""
    report: dict[str, Any] = {"id": name, "what": what, "trials": 0, "passes": 0, "figures": {}, "skipped": skipped}
    for title, trial in {} if skipped else trial_of.items():
        outcomes = []
        for _ in range(trials):
            start_s = time.monotonic()
            try:
                outcome = {"passed": True, **trial()}
            except ScenarioFailed as error:
                outcome = {"passed": False, "reason": str(error)}
            outcomes.append({**outcome, "whole trial s": round(time.monotonic() - start_s, 1)})
        report["figures"][title] = outcomes
        report["trials"] += trials
        report["passes"] += sum(outcome["passed"] for outcome in outcomes)
    return report


def print_report(report: dict[str, Any]) -> int:
    """Print a report as JSON; return 0 when every trial passed."""
    print(json.dumps(report, indent=2))
    return 0 if report["passes"] == report["trials"] else 1
