"""One rank of the soak: trains, notes what happens, and suffers faults that are asked for."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tensorflow as tf

import estimator_ext
import hostopt
from hostopt.transport import grpc_parts
from hostopt.transport.frame import FrameWriter

SEED, EXAMPLES, PIXELS, CLASSES, HIDDEN, BATCH = 7, 6000, 784, 10, 32, 32
CHECKPOINT_STEPS = 100
# So that a recovery takes seconds; the default times are for networks, not for tests.
PING_S, COLLECTIVE_TIMEOUT_S, RENDEZVOUS_TIMEOUT_S = 3.0, 30.0, 60.0
_POLL_S = 0.02


# --- the training -------------------------------------------------------------------------------


def dense(inputs: Any, units: int, name: str) -> Any:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [inputs.shape[1], units])
        bias = tf.compat.v1.get_variable(
            "bias", [units], initializer=tf.compat.v1.zeros_initializer()
        )
    return inputs @ kernel + bias


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    hidden = tf.nn.relu(dense(features, HIDDEN, "hidden"))
    logits = dense(hidden, CLASSES, "logits")
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    loss = tf.reduce_sum(losses) / BATCH
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.01, 0.9)
    variables = tf.compat.v1.trainable_variables()

    def host_model_fn(*gradients: Any) -> Any:
        return optimizer.apply_gradients(zip(gradients, variables))

    gradients = [g for g, _ in optimizer.compute_gradients(loss, var_list=variables)]
    return estimator_ext.EstimatorSpec(
        mode, loss=loss, train_op=tf.identity(loss), host_call=(host_model_fn, gradients)
    )


def input_fn(input_context: tf.distribute.InputContext) -> Any:
    """Sharded, shuffled anew in each epoch, repeated; numbers are shuffled, not images."""
    random = np.random.RandomState(SEED)
    x = tf.constant(random.rand(EXAMPLES, PIXELS).astype(np.float32))
    y = tf.constant(random.randint(0, CLASSES, EXAMPLES))
    numbers = tf.data.Dataset.range(EXAMPLES)
    numbers = numbers.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    numbers = numbers.shuffle(EXAMPLES, SEED, reshuffle_each_iteration=True)
    batches = numbers.repeat().batch(BATCH, drop_remainder=True)
    return batches.map(lambda chosen: (tf.gather(x, chosen), tf.gather(y, chosen)))


class Progress(tf.compat.v1.train.SessionRunHook):
    """Notes every step of the chief."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def begin(self) -> None:
        self._global_step = tf.compat.v1.train.get_global_step()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._notes.add("step", step=int(run_context.session.run(self._global_step)))


class Notes:
    """What this rank has to tell, as lines of JSON in a file of its slot."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.slot = int(os.environ["HOSTOPT_SLOT"])
        path = directory / f"slot{self.slot}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def add(self, kind: str, **facts: Any) -> None:
        """Write a line at once: the next moment this process may be killed."""
        note = {"kind": kind, "time": time.time(), "pid": os.getpid(), **facts}
        os.write(self._fd, json.dumps(note).encode() + b"\n")


# --- faults inside the process ------------------------------------------------------------------


class Faults:
    """Waits for the name of a fault in a file, and has it happen.

    Args:
      notes: where it is told when it happened.
      ports: the ports of the other ranks.
    """

    def __init__(self, notes: Notes, ports: list[int]) -> None:
        self._notes = notes
        self._ports = ports
        self._request = notes.directory / f"fault.{os.getpid()}"
        self._corrupt = threading.Event()
        write = FrameWriter.write

        def write_frame(writer: FrameWriter, tag: Any, payload: Any) -> bytes:
            frame = write(writer, tag, payload)
            if self._corrupt.is_set() and len(payload):
                self._corrupt.clear()
                notes.add("fault", action="corrupt")
                middle = len(frame) - 1 - len(payload) // 2
                frame = frame[:middle] + bytes([frame[middle] ^ 16]) + frame[middle + 1 :]
            return frame

        FrameWriter.write = write_frame  # type: ignore[method-assign]
        threading.Thread(target=self._watch, name="faults", daemon=True).start()

    def _watch(self) -> None:
        while not self._request.exists():
            time.sleep(_POLL_S)
        if self._request.read_text() == "corrupt":
            self._corrupt.set()
            return
        self._notes.add("fault", action="close")
        close_connections(self._ports[0])


def close_connections(port: int) -> None:
    """Shut down all TCP connections of this process to a port.

    Args:
      port: where a peer listens.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[2].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    for fd in os.listdir("/proc/self/fd"):
        try:
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}"))
            if inode and inode[1] in inodes:
                with socket.socket(fileno=os.dup(int(fd))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was closed meanwhile
            continue


# --- both together ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--notes", type=Path, required=True, help="directory for notes")
    parser.add_argument("--max-steps", type=int, help="without: until a signal comes")
    args = parser.parse_args()
    grpc_parts.KEEPALIVE_S = grpc_parts.PING_TIMEOUT_S = PING_S
    estimator_ext.install()
    notes = Notes(args.notes)
    strategy = estimator_ext.HostOffloadStrategy(
        communication="grpc",
        checksum=True,  # of the data, too, though all addresses are loopback ones
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        rendezvous_timeout_s=RENDEZVOUS_TIMEOUT_S,
    )
    ring, rank = strategy.cluster.ring, strategy.cluster.rank
    peers = [*ring[rank + 1 :], *ring[:rank]]
    Faults(notes, [int(peer.address.rpartition(":")[2]) for peer in peers])
    notes.add("start")
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        tf_random_seed=SEED,
        save_checkpoints_steps=CHECKPOINT_STEPS,
        save_summary_steps=None,
        log_step_count_steps=None,
    )
    classifier = estimator_ext.Estimator(model_fn, args.model_dir, config)
    hooks = [Progress(notes)] if rank == 0 else []
    try:
        classifier.train(input_fn, hooks=hooks, max_steps=args.max_steps)
    except hostopt.HostOptError as error:
        notes.add("error", error=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    main()
