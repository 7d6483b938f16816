"""Replica consistency check: compared steps, and named differences."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from rings import Spawn

import hostopt
from estimator_ext.variables.desync import DesyncCheckHook


class Values:
    """A session with variables of given values and a global_step that counts."""

    def __init__(self, step: int, values: dict[str, Any]) -> None:
        self.step, self.values = step, values

    def run(self, variable: Any) -> Any:
        if isinstance(variable, list):
            return [self.run(each) for each in variable]
        name = variable.op.name
        return np.int64(self.step) if name == "global_step" else self.values[name]


def checked_steps(
    communicator: hostopt.Communicator, start: int, every: int, per_run: int, values: Any
) -> list[int]:
    """Returns the steps up to 12 after which variables were compared, until they differ."""
    with tf.Graph().as_default():
        variables = [tf.compat.v1.get_variable(n, v.shape, v.dtype) for n, v in values(0).items()]
        words = tf.compat.v1.get_variable("words", initializer=tf.constant(["a"]))
        tf.compat.v1.train.create_global_step()
        session = Values(start, values(start))
        hook = DesyncCheckHook(communicator, [*variables, words], every, per_run, {})
        hook.after_create_session(session, None)
        result = []
        for step in range(start + per_run, 13, per_run):
            session.values = values(step)
            before = next(communicator._steps)
            hook.after_run(types.SimpleNamespace(session=session), None)
            if next(communicator._steps) > before + 1:
                result.append(step)
        return result


@pytest.mark.parametrize(
    ("start", "every", "per_run", "expected"),
    [
        (0, 1, 1, list(range(1, 13))),
        (0, 5, 1, [1, 5, 10]),
        (7, 5, 1, [8, 10]),  # 8 is the first step of this training
        (0, 4, 3, [3, 6, 9, 12]),  # the first runs that reach 1, 4, 8 and 12
        (0, 1000, 1, [1, 10]),
    ],
)
def test_the_ranks_compare_after_the_same_steps(
    spawn_inproc: Spawn, start: int, every: int, per_run: int, expected: list[int]
) -> None:
    def work(communicator: hostopt.Communicator) -> list[int]:
        return checked_steps(communicator, start, every, per_run, lambda _: {"a": np.zeros(3)})

    assert spawn_inproc(2, work) == [expected] * 2


def test_the_first_variable_and_the_ranks_that_differ_are_named(spawn_inproc: Spawn) -> None:
    def work(communicator: hostopt.Communicator) -> Any:
        def values(step: int) -> dict[str, Any]:
            changed = 1.0 if communicator.rank in (1, 3) and step >= 5 else 0.0
            bits = np.nextafter(np.float32(0), np.float32(1)) * changed
            return {
                "a": np.zeros((2, 3), np.float32).T,
                "b": np.full(4, bits, np.float32),  # the last bit
                "c": np.array(changed > 0 and communicator.rank == 3),
            }

        with pytest.raises(hostopt.CollectiveMismatchError) as caught:
            checked_steps(communicator, 0, 3, 1, values)
        return caught.value

    errors = spawn_inproc(4, work)
    assert len({str(error) for error in errors}) == 1
    message = str(errors[0])
    assert "after step 6 variable 'b' and 1 more differ between rank 0 (worker:0, " in message
    assert "and rank 1 (worker:1, " in message
    assert "rank 3 (worker:3, " in message
    assert "rank 2" not in message
    assert {(error.rank, error.step) for error in errors} == {(1, 6)}


def test_a_change_after_the_last_comparison_is_found_at_the_end(spawn_inproc: Spawn) -> None:
    def work(communicator: hostopt.Communicator) -> Any:
        with tf.Graph().as_default():
            variable = tf.compat.v1.get_variable("a", [3])
            tf.compat.v1.train.create_global_step()
            session = Values(0, {"a": np.zeros(3)})
            hook = DesyncCheckHook(communicator, [variable], 1000, 1, {})
            hook.after_create_session(session, None)
            for _ in range(4):
                hook.after_run(types.SimpleNamespace(session=session), None)
            hook.end(session)
            session.values = {"a": np.full(3, float(communicator.rank))}
            with pytest.raises(hostopt.CollectiveMismatchError) as caught:
                hook.end(session)
            return str(caught.value)

    messages = spawn_inproc(2, work)
    assert len(set(messages)) == 1
    assert "after step 4 variable 'a' differs between rank 0 " in messages[0]
    assert "The step's graph shows no likely cause" in messages[0]
