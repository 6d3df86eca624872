"""Run a script and write its process's peak memory to a file, in the same way for both sides of a
comparison.

`python -m benchmarks.measured USAGE.json SCRIPT [ARGUMENTS]`, with the project's folder on
PYTHONPATH. The file is written only when the script succeeds.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.signals import die_with_parent


def main(usage_file: Path, script: Path, arguments: list[str]) -> int:
    """Run `script` as the main program; return its exit code.

    The memory is that of this process alone, without loader workers.
    """
    die_with_parent(only_under_torchrun=False)
    prepare_environment()
    import torch

    from yolo_seg_ddp.utils.devices import peak_memory_bytes

    sys.argv = [str(script), *arguments]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    if code == 0:
        usage = {
            "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
            "peak_gpu_memory_bytes": torch.cuda.max_memory_allocated()
            if torch.cuda.is_initialized()
            else None,
        }
        write_text_atomic(usage_file, json.dumps(usage) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
