"""Run a script and write its process's peak memory to a file, in the same way for both sides of a comparison.

`python -m benchmarks.measured USAGE.json SCRIPT [ARGUMENTS]`, with the project's folder on PYTHONPATH. The exit code is the
script's. The file is written whatever the code is.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
from pathlib import Path

from utils.common.environment import prepare_environment
from utils.common.files import write_text_atomic
from utils.common.signals import die_with_parent


def main(usage_file: Path, script: Path, arguments: list[str]) -> None:
    """Run `script` as the main program.

    The memory is that of this process alone, without loader workers.
    """
    die_with_parent(only_under_torchrun=False)
    prepare_environment()
    atexit.register(write_usage, usage_file)  # the script ends the process
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def write_usage(usage_file: Path) -> None:
    """Write the peak memory of this process so far."""
    import torch

    from utils.common.devices import peak_memory_bytes

    usage = {
        "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
        "peak_gpu_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
    }
    write_text_atomic(usage_file, json.dumps(usage) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
