"""`compiled`: Numba's decorator for loops over arrays.

Compiled code is kept between runs in a folder of this user.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from yolo_seg_ddp.utils.environment import user_folder

# read when Numba is imported; by default it writes beside the source
if "NUMBA_CACHE_DIR" not in os.environ:
    os.environ["NUMBA_CACHE_DIR"] = str(user_folder("numba"))

from numba import njit

_Loops = TypeVar("_Loops", bound=Callable[..., Any])


def compiled(function: _Loops, **options: Any) -> _Loops:
    """Compile a function of arrays and numbers.

    This happens at its first call and takes some seconds.
    """
    return njit(cache=True, **options)(function)  # type: ignore[return-value]
