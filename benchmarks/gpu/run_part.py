"""Runs one part in a process of its own: `python -m benchmarks.gpu.run_part NAME SETTING.json ANSWER.json`."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.plan import FAILED, NEEDS_GPU, OK, NeedsGpu, Outcome, Part, PartFailed, Setting
from benchmarks.jobs import TooSlow
from utils.common.environment import prepare_environment
from utils.common.errors import UserError, one_line
from utils.common.files import write_text_atomic
from utils.common.signals import die_with_parent


def main() -> None:
    """Run the part that the command line names, and write how it ended."""
    name, setting_file, answer_file = sys.argv[1:]
    die_with_parent(only_under_torchrun=False)
    prepare_environment()
    setting = read_setting(Path(setting_file))
    (part,) = [part for part in PARTS if part.name == name]
    write_text_atomic(Path(answer_file), json.dumps(asdict(outcome_of(part, setting))))


def read_setting(file: Path) -> Setting:
    """Read what `runner.start` wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return Setting(content["device"], content["num_gpus"], Path(content["folder"]))


def outcome_of(part: Part, setting: Setting) -> Outcome:
    """Run a part here and return how it ended. An error's traceback goes to stderr, which is the part's log."""
    try:
        found = part.run(setting)
    except NeedsGpu as error:
        return Outcome(NEEDS_GPU, said=str(error), figures=error.figures)
    except PartFailed as error:
        return Outcome(FAILED, said=str(error), figures=error.figures)
    except (TooSlow, UserError) as error:
        return Outcome(FAILED, said=one_line(error, 600))
    except Exception as error:  # noqa: BLE001 # it counts as failed, and the other parts still run
        traceback.print_exc()
        return Outcome(FAILED, said=f"{type(error).__name__}: {one_line(error, 600)}")
    return Outcome(OK, said=found.said, figures=found.figures)


if __name__ == "__main__":
    main()
