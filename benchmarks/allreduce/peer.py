"""One rank of a peer: the loop of `hostopt bench` around the peer's all-reduce."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks import common
from hostopt.cluster.cluster import Cluster
from hostopt.measure import bench


class Gloo:
    """PyTorch's Gloo over TCP, in place.

    Args:
      store: file for the rendezvous of the ranks.
    """

    def __init__(self, store: str) -> None:
        import torch
        from torch import distributed

        cluster = Cluster.from_tf_config()
        self.rank, self.size = cluster.rank, cluster.size
        self.torch, self.distributed = torch, distributed
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=self.rank, world_size=self.size
        )

    def load(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array)

    def all_reduce(self, buffer: Any) -> Any:
        self.distributed.all_reduce(buffer)
        return buffer

    def read(self, buffer: Any) -> np.ndarray:
        return buffer.numpy()

    def gather(self, values: np.ndarray) -> np.ndarray:
        rows = [self.torch.empty(values.size, dtype=self.torch.float64) for _ in range(self.size)]
        self.distributed.all_gather(rows, self.torch.from_numpy(values))
        return np.stack([row.numpy() for row in rows])

    def barrier(self) -> None:
        self.distributed.barrier()

    def close(self) -> None:
        self.distributed.destroy_process_group()  # else it may abort at exit


class Mpi:
    """OpenMPI with its default on one host, which is shared memory; in place."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size

    def load(self, array: np.ndarray) -> np.ndarray:
        return array

    def all_reduce(self, buffer: np.ndarray) -> np.ndarray:
        self.world.Allreduce(self.mpi.IN_PLACE, buffer)
        return buffer

    def read(self, buffer: np.ndarray) -> np.ndarray:
        return buffer

    def gather(self, values: np.ndarray) -> np.ndarray:
        rows = np.empty((self.size, values.size))
        self.world.Allgather(values, rows)
        return rows

    def barrier(self) -> None:
        self.world.Barrier()


class NonBlockingMpi(Mpi):
    """The call of MPI that hostopt makes too, and a wait; in place."""

    def all_reduce(self, buffer: np.ndarray) -> np.ndarray:
        self.world.Iallreduce(self.mpi.IN_PLACE, buffer).Wait()
        return buffer


class TensorFlowRing:
    """The RING of MultiWorkerMirroredStrategy, over gRPC; it returns a new tensor."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.tf = tf
        experimental = tf.distribute.experimental
        self.options = experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation.RING
        )
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=self.options
        )
        cluster = Cluster.from_tf_config()
        self.rank, self.size = cluster.rank, cluster.size
        self.all_reduce = tf.function(self._all_reduce)

    def _all_reduce(self, tensor: Any) -> Any:
        def reduce(value: Any) -> Any:
            context = self.tf.distribute.get_replica_context()
            placed = self.tf.identity(value)  # no copy; all_reduce asks for the device
            return context.all_reduce(self.tf.distribute.ReduceOp.SUM, placed, self.options)

        return self.strategy.run(reduce, args=(tensor,))

    def load(self, array: np.ndarray) -> Any:
        return self.tf.constant(array)

    def read(self, buffer: Any) -> np.ndarray:
        return buffer.numpy()

    def gather(self, values: np.ndarray) -> np.ndarray:
        rows = np.zeros((self.size, values.size))
        rows[self.rank] = values
        return self.all_reduce(self.tf.constant(rows)).numpy()

    def barrier(self) -> None:
        self.gather(np.zeros(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["gloo", "mpi", "mpi4py", "tf"], required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--store", help="file in which ranks of Gloo meet")
    args = parser.parse_args()
    group: Any
    if args.peer == "gloo":
        group = Gloo(args.store)
    else:
        group = {"mpi": Mpi, "mpi4py": NonBlockingMpi, "tf": TensorFlowRing}[args.peer]()
    measured = {}
    for size_bytes in args.sizes:
        bench.check_sums(group, size_bytes)
        seconds, processor_s = bench.measure(group, size_bytes, args.repetitions)
        measured[size_bytes] = common.median(seconds), processor_s
    group.barrier()  # no rank may leave early
    if group.rank == 0:
        common.report(measured=measured)
    if isinstance(group, Gloo):
        group.close()


if __name__ == "__main__":
    main()
