"""Settings of the process that make training steps faster without changing what they compute."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt in glibc's malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the C library keep memory that tensors on the CPU have freed, for the next ones; return whether it does.

    By default glibc gives large blocks back to the system at once, and each step gets every activation anew, page by
    page, filled with zeros. The process does not grow beyond its peak; it only does not shrink. Call it early.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # another C library; its mallopt, if any, knows nothing of these
        return False
    never = -1
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, never))
