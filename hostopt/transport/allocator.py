"""Keeps freed memory in the process, so that each message does not fault its pages in anew.

Messages of a MiB come and go a thousand times a second, and grpcio copies each one several times
into fresh memory. glibc gives such memory back to the kernel at once, and takes it again zeroed,
page by page: half of the time that a message costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__: list[str] = []

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_SETTINGS = {
    _M_MMAP_THRESHOLD: 32 << 20,  # the most that glibc takes
    _M_TRIM_THRESHOLD: 256 << 20,
    _M_TOP_PAD: 16 << 20,
}


def keep_freed_memory() -> None:
    """Tell glibc to keep up to 256 MiB of freed memory, unless the environment tunes malloc."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for setting, nbytes in _SETTINGS.items():
            mallopt(setting, nbytes)
