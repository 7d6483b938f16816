"""Answers to programs that ask which libraries Horovod was built with: MPI, if it is in use."""

from __future__ import annotations

from hostopt import process_ring


def mpi_threads_supported() -> bool:
    """Returns True if MPI is in use, as hostopt requires its support of threads."""
    return mpi_enabled()


def mpi_enabled() -> bool:
    """Returns True if the ring of this process uses `communication="mpi"`."""
    if not process_ring.is_initialized():
        return False
    return process_ring.current().communicator.network.world is not None


def mpi_built() -> bool:
    """Returns `mpi_enabled`: hostopt is built without any library."""
    return mpi_enabled()


def gloo_enabled() -> bool:
    """Returns False: there is no Gloo."""
    return False


def gloo_built() -> bool:
    """Returns False: there is no Gloo."""
    return False


def nccl_built() -> int:
    """Returns 0, in the place of a version: there is no NCCL."""
    return 0


def ddl_built() -> bool:
    """Returns False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns False: hostopt reduces on the host, whatever TensorFlow was built with."""
    return False


def rocm_built() -> bool:
    """Returns False: hostopt reduces on the host, whatever TensorFlow was built with."""
    return False


def is_homogeneous() -> bool:
    """Returns True if every host has the same number of ranks."""
    return len({len(group) for group in process_ring.current().hosts.groups}) == 1
