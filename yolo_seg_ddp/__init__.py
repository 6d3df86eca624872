"""Training, prediction and evaluation from Python, as the scripts do them: docs/python.md.

from yolo_seg_ddp import evaluate, open_model, train

All scripts import this package, so importing it loads nothing else: `api.py` is read when one of
the three is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yolo_seg_ddp.api import evaluate, open_model, train

__all__ = ["evaluate", "open_model", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from yolo_seg_ddp import api

    return getattr(api, name)
