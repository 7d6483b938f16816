"""Copies of variables on an accelerator with memory of its own; a second CPU device stands for it.

Programs that change variables beside the step train as with the stock Estimator: no step, and no
other run of the session, sees a stale copy.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext._tf_private import control_outputs
from estimator_ext.estimator import training_graph
from estimator_ext.estimator.accelerator_copies import CopiesHook

estimator_ext.install()

v1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
ACCELERATOR = "/device:CPU:1"
X = RANDOM.standard_normal((48, 6)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
STEPS = 12


def dense(x: tf.Tensor, name: str, units: int) -> tf.Tensor:
    start = np.random.RandomState(units).standard_normal((x.shape[1], units))
    kernel = v1.get_variable(f"{name}/kernel", initializer=start.astype(np.float32))
    bias = v1.get_variable(f"{name}/bias", [units], initializer=v1.zeros_initializer())
    return tf.matmul(x, kernel) + bias


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str, params: Any) -> Any:
    shift = v1.get_variable("shift", [6], initializer=v1.zeros_initializer())
    features += tf.stop_gradient(shift)
    logits = dense(tf.nn.relu(dense(features, "first", 8)), "second", 2)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    if params == "micro-batches":  # each of them changes a variable that the step reads
        with tf.control_dependencies([loss]):
            shifted = shift.assign(shift.read_value() + 0.1)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, shifted)
    optimizer, step = v1.train.AdamOptimizer(0.05), v1.train.get_global_step()
    pairs = optimizer.compute_gradients(loss)

    def apply() -> tf.Operation:
        return optimizer.apply_gradients(pairs, step)

    if params.startswith("in a branch"):
        if "TensorFlow 1" in params:
            v1.disable_control_flow_v2()
        train_op = tf.cond(step % 3 < 2, lambda: tf.group(apply()), lambda: step.assign_add(1).op)
        v1.enable_control_flow_v2()
    else:
        train_op = apply()
    if params == "summary":  # read in no step, as no summary is written
        reads = v1.get_variable("reads", [], tf.int32, v1.zeros_initializer(), trainable=False)
        kernel = v1.trainable_variables()[0]

        @tf.function
        def norm() -> tf.Tensor:
            reads.assign_add(1)
            return tf.norm(kernel.read_value())

        v1.summary.scalar("norm", norm())
    if params == "clipped in the step":
        with tf.control_dependencies([train_op]):
            train_op = tf.group(*[clipped(v) for v in v1.trainable_variables()])
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def clipped(variable: tf.Variable) -> tf.Operation:
    return variable.assign(tf.clip_by_value(variable.read_value(), -0.5, 0.5))


class Changing(v1.train.SessionRunHook):
    """Changes variables beside the step in some ways, and reads what is computed from them."""

    def __init__(self, way: str, directory: Path) -> None:
        self._way = way
        self._path = str(directory / "kept")

    def begin(self) -> None:
        self._variables = v1.trainable_variables()
        self._sum = tf.add_n([tf.reduce_sum(v.value()) for v in self._variables])
        self._halve = [v.assign(v.read_value() * 0.5) for v in self._variables]
        operations = v1.get_default_graph().get_operations()
        self._updates = [op for op in operations if op.type == "ResourceApplyAdam"]
        with tf.control_dependencies(self._updates):
            self._clip = [clipped(v) for v in self._variables]
        self._savers = []
        if self._way == "restored by a saver":
            self._savers = [v1.train.Saver(self._variables)]
        self._step = 0

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._way == "restored by the scaffold":
            self._savers = v1.get_collection(v1.GraphKeys.SAVERS)

    def before_run(self, run_context: Any) -> Any:
        self._step += 1
        is_due = self._way == "changed in the same run" and self._step in (4, 5, 9)
        return v1.train.SessionRunArgs(self._clip) if is_due else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        session = run_context.session
        if self._way == "changed between runs" and self._step in (4, 5, 9):
            session.run(self._halve)
        if self._way == "updated once more" and self._step in (4, 7):
            session.run(self._updates)
        if self._way == "loaded" and self._step == 6:
            for variable in self._variables:
                variable.load(np.full(variable.shape, 0.25, np.float32), session)
        for saver in self._savers:
            if self._step == 3:
                saver.save(session, self._path, write_meta_graph=False)
            if self._step == 7:
                saver.restore(session, self._path)
        values = session.run(self._variables)
        np.testing.assert_allclose(session.run(self._sum), sum(map(np.sum, values)), rtol=1e-4)


WAYS = ["changed between runs", "changed in the same run", "loaded", "updated once more"]
WAYS += ["restored by a saver", "restored by the scaffold"]


def trained(directory: Path, strategy: Any, model: str, hook: Any) -> dict[str, np.ndarray]:
    kind = tf.estimator if strategy is None else estimator_ext
    # a summary in the first step only, whether the stock hook reads global_step early or late
    settings: dict[str, Any] = {"tf_random_seed": 1, "save_summary_steps": 2 * STEPS}
    if model == "micro-batches":
        settings["accumulate_steps"] = 3
    config = kind.RunConfig(train_distribute=strategy, **settings)
    estimator = kind.Estimator(model_fn, str(directory), config, params=model)
    dataset = tf.data.Dataset.from_tensor_slices
    estimator.train(lambda: dataset((X, Y)).batch(12).repeat(), [hook], steps=STEPS)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def trained_with_copies(
    directory: Path, monkeypatch: pytest.MonkeyPatch, model: str, hook: Any
) -> dict[str, np.ndarray]:
    monkeypatch.setattr(training_graph, "is_gpu", lambda device: True)
    strategy = estimator_ext.HostOffloadStrategy(accelerator=ACCELERATOR)
    with contextlib.closing(strategy):
        return trained(directory, strategy, model, hook)


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(("plain", way) for way in WAYS),
        ("clipped in the step", ""),
        ("in a branch", ""),
        ("in a branch of TensorFlow 1", ""),
        ("summary", ""),
        ("micro-batches", ""),
    ],
)
def test_steps_read_what_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, way: str
) -> None:
    reference = None
    if model == "micro-batches":  # which the stock Estimator does not have
        reference = estimator_ext.HostOffloadStrategy(accelerator=ACCELERATOR)
    changing = Changing(way, tmp_path)
    expected = trained(tmp_path / "reference", reference, model, changing)
    copies = []
    build = CopiesHook._copy
    monkeypatch.setattr(
        CopiesHook,
        "_copy",
        lambda self, variable, *others: copies.append(variable) or build(self, variable, *others),
    )
    values = trained_with_copies(tmp_path / "copies", monkeypatch, model, changing)
    assert len(copies) == (1 if "TensorFlow 1" in model else 5)
    assert values.keys() == expected.keys()  # copies are in no checkpoint
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


class Pinned(v1.train.SessionRunHook):
    """Records the devices that read each value in pinned memory."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        copies = [op for op in session.graph.get_operations() if op.type == "DeepCopy"]
        users = [op.outputs[0].consumers() for op in copies]
        self.devices = [{op.device[-5:] for op in each if control_outputs(op)} for each in users]


def test_variables_are_in_memory_that_is_sent_to_the_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = Pinned()
    trained_with_copies(tmp_path, monkeypatch, "plain", hook)
    assert hook.devices == [{"CPU:0", "CPU:1"}] * 5


def test_a_training_goes_on_if_pinned_memory_is_exhausted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(value: np.ndarray) -> np.ndarray:
        raise MemoryError("no pinned memory")

    def copy(x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(exhausted, [x], x.dtype), x.shape)

    monkeypatch.setattr(tf.raw_ops, "DeepCopy", copy)
    values = trained_with_copies(tmp_path, monkeypatch, "plain", Pinned())
    assert values["global_step"] == STEPS
    (warning,) = [each for each in caplog.messages if "pinned memory" in each]
    assert "Raise TF_GPU_HOST_MEM_LIMIT_IN_MB" in warning
