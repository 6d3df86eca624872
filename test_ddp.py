"""Checks whether this machine is ready to train: one line per check, with the fix if there is a
problem.

    python test_ddp.py

Exits with 0 if no check failed; warnings (no GPU, no data yet) are not failures. Writes only
temporary files.
"""

from __future__ import annotations

from dataclasses import dataclass

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML
from yolo_seg_ddp.measure.machine_checks import run_checks
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import EXIT_DONE, EXIT_FAILED, run_script
from yolo_seg_ddp.utils.options import Options, option


@dataclass(frozen=True)
class MachineCheckConfig(Options):
    """Options of `test_ddp.py`."""

    data: str = option(str(DEFAULT_DATASET_YAML), "data-set YAML to check", metavar="FILE")
    timeout_s: float = option(
        120.0, "time limit for the training step of several processes", metavar="SECONDS", above=0
    )


def main() -> int:
    """Run the checks; return the exit code."""
    config = parse_config(MachineCheckConfig, __doc__)
    statuses = []
    for result in run_checks(config.data, config.timeout_s):
        print(result, flush=True)
        statuses.append(result.status)
    failures = statuses.count("fail")
    if failures:
        print(f"✗ {failures} of {len(statuses)} checks failed")
        return EXIT_FAILED
    print("✓ All tests passed!")
    return EXIT_DONE


if __name__ == "__main__":
    run_script(main)
