"""Process-wide settings of gRPC and of the allocator, applied before gRPC is imported.

Import gRPC from here: `from hostopt.transport.grpc.runtime import grpc`. A variable that the user
has set wins. docs/architecture.md (Threads) has the reasons. GRPC_ENABLE_FORK_SUPPORT is set in
`hostopt.transport`, as a program may import gRPC between `import hostopt` and its first
communicator.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

_EXPERIMENTS = "GRPC_EXPERIMENTS"
_SET_BY_USER = _EXPERIMENTS in os.environ
if not _SET_BY_USER:
    os.environ[_EXPERIMENTS] = (
        "-event_engine_client,-event_engine_listener,tcp_rcv_lowat,tcp_frame_size_tuning"
    )
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc as grpc  # noqa: E402, PLC0414  after the variables that it reads

if not _SET_BY_USER:
    del os.environ[_EXPERIMENTS]


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_SETTINGS = {
    _M_MMAP_THRESHOLD: 32 << 20,  # glibc's maximum
    _M_TRIM_THRESHOLD: 256 << 20,
    _M_TOP_PAD: 16 << 20,
}


def keep_freed_memory() -> None:
    """Tells glibc to keep up to 256 MiB of freed memory, unless the environment tunes malloc.

    grpcio copies each message several times into fresh memory, whose page faults would be half of
    a message's cost.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for setting, nbytes in _SETTINGS.items():
            mallopt(setting, nbytes)


@functools.cache
def keep_aio_running() -> None:
    """Keeps grpc.aio initialized until the process ends; call it on the event loop.

    Otherwise it ends with its last object. With grpcio 1.62 that fails if the object lives until
    the interpreter ends, as objects do that a function of TensorFlow refers to.
    """
    grpc.aio.init_grpc_aio()
