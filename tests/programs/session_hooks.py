"""Hooks of programs that do something at a step, or at the end."""

from __future__ import annotations

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


class Dump(Hook):
    """Writes all variables of this rank at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        self._variables = {v.op.name: v for v in tf.compat.v1.global_variables()}

    def end(self, session: tf.compat.v1.Session) -> None:
        np.savez(self._path, **session.run(self._variables))
