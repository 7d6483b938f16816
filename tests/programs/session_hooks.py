"""Hooks of programs that do something at a step, or at the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

Hook = tf.compat.v1.train.SessionRunHook


class BeforeStep(Hook):
    """Calls a function before a step of this hook, counted from 1."""

    def __init__(self, step: int, call: Callable[[Any], Any]) -> None:
        self._steps_left, self._call = step, call

    def before_run(self, run_context: Any) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._call(run_context)


class AfterStep(Hook):
    """Calls a function after a step of this hook, counted from 1."""

    def __init__(self, step: int, call: Callable[[Any], Any]) -> None:
        self._steps_left, self._call = step, call

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._call(run_context)


def stop_here(run_context: Any) -> None:
    """Announces a completed step or batch, and blocks until a test kills this process."""
    print("stopped here", flush=True)
    threading.Event().wait()


class Dump(Hook):
    """Writes all variables of this rank at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        self._variables = {v.op.name: v for v in tf.compat.v1.global_variables()}

    def end(self, session: tf.compat.v1.Session) -> None:
        np.savez(self._path, **session.run(self._variables))


class Trace(Hook):
    """Writes what ran in the fourth step, and the tensors between the operations."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._step = 0

    def before_run(self, run_context: Any) -> Any:
        self._step += 1
        full = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        return tf.compat.v1.train.SessionRunArgs([], options=full)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self._step == 4:
            stats = run_values.run_metadata.step_stats.dev_stats
            nodes = {d.device: [n.node_name for n in d.node_stats] for d in stats}
            operations = tf.compat.v1.get_default_graph().get_operations()
            record = {
                "nodes": nodes,
                "types": {op.name: op.type for op in operations},
                "inputs": {op.name: [tensor.name for tensor in op.inputs] for op in operations},
                "outputs": {op.name: [tensor.name for tensor in op.outputs] for op in operations},
                "nbytes": {t.name: nbytes(t) for op in operations for t in op.outputs},
                "variables": {v.op.name: v.device for v in tf.compat.v1.global_variables()},
            }
            Path(self._path).write_text(json.dumps(record))


def nbytes(tensor: tf.Tensor) -> int:
    """Returns the size of a tensor, or of the variable that it stands for; 0 if it is unknown."""
    shape, dtype = tensor.shape, tensor.dtype
    if tensor.op.type == "VarHandleOp":
        shape, dtype = tf.TensorShape(tensor.op.get_attr("shape")), tensor.op.get_attr("dtype")
    return (shape.num_elements() or 0) * dtype.size
