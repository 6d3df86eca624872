"""Writes what a benchmark measured, with its options and the machine's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from yolo_seg_ddp.utils.environment import environment_report
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.options import Options, to_dict


def write_results(
    file: str | Path, config: Options, *, environment: dict[str, Any] | None = None, **results: Any
) -> None:
    """Write a benchmark's results; `environment` adds to the report of this machine."""
    machine = {**environment_report(), **(environment or {})}
    text = json.dumps({"config": to_dict(config), "environment": machine, **results}, indent=2)
    Path(file).resolve().parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(Path(file), text + "\n")


def results_file(config: Any) -> Path:
    """Return where `--json` wants the results; unset: results.json in `--output`."""
    return Path(config.json or Path(config.output) / "results.json").resolve()
