"""What the recipes' tests share: a rank that dies in its training, tensors that must be equal, and
refusals.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.plugin import PROJECT
from yolo_seg_ddp.utils.errors import UserError

RECIPES = PROJECT / "recipes"
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def dying(owner: type, method_name: str, at: int) -> Iterator[None]:
    """Kill this process at its call number `at` of a method while it trains; 0: never."""
    method, calls_left = getattr(owner, method_name), at

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal calls_left
        calls_left -= torch.is_grad_enabled()
        if at and not calls_left:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method_name, counted)
        yield


def assert_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Check that two state dicts hold the same bits."""
    assert first.keys() == second.keys()
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []


def assert_equal_moments(
    first: Mapping[str, Any], second: Mapping[str, Any], moment: str = "exp_avg_sq"
) -> int:
    """Check that two optimizers' states hold the same moments; return their number."""
    moments = [[entry[moment] for entry in saved["state"].values()] for saved in (first, second)]
    assert len(moments[0]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*moments, strict=True))
    return len(moments[0])


@contextmanager
def assert_refused(*parts: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Expect an error for the user, of one line, that contains these parts."""
    with pytest.raises(kind, match=re.escape(parts[0])) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def run_command(module: ModuleType, *arguments: str | Path | int) -> int:
    """Call a command's `main` in this process, as if from its command line; return the exit code.

    A training keeps this process's threads: two of them wait long for each other beside other
    programs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(module.__file__), *map(str, arguments)])
        patch.setenv("OMP_NUM_THREADS", "1")
        return int(module.main() or 0)
