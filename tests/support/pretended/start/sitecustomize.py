"""Start of every Python process that has this folder in PYTHONPATH: PRETEND_GPUS pretended GPUs,
once torch is imported.
"""

import importlib.abc
import importlib.util
import os
import pathlib
import sys
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be imported as usual, then switches the pretence on."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            from tests.support.pretended import gpu

            gpu.switch_on(int(os.environ["PRETEND_GPUS"]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _show_driver() -> None:
    """Let the launcher, which has not imported torch, find the driver's file."""
    exists = pathlib.Path.exists
    pathlib.Path.exists = lambda self, **options: (  # type: ignore[method-assign]
        str(self) == "/dev/nvidiactl" or exists(self, **options)
    )


if os.environ.get("PRETEND_GPUS"):
    sys.path.insert(1, str(pathlib.Path(__file__).parents[4]))
    sys.meta_path.insert(0, _AfterTorch())
    _show_driver()
