"""Several evaluators: their common metrics, and refused configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from evaluated import data, evaluate, largest, local, model_fn
from rings import Spawn

import estimator_ext
import hostopt
from estimator_ext.evaluation.evaluation import CheckpointEvaluation
from estimator_ext.evaluation.evaluators import Evaluators, find_summable, with_evaluators

estimator_ext.install()


def test_one_process_evaluates_all_eval_specs(tmp_path: Path) -> None:
    specs = [tf.estimator.EvalSpec(blind_data, name=name) for name in ("day", "night")]
    metrics, exports = evaluate(estimator_ext, None, tmp_path, *specs)
    assert [(name, result["global_step"]) for name, result in metrics.items()] == [
        ("day", 1),
        ("night", 1),
    ]
    assert exports == {"day": [], "night": []}


def test_a_damaged_checkpoint_is_skipped_and_the_next_one_evaluated(tmp_path: Path) -> None:
    estimator = estimator_ext.Estimator(one_metric_model_fn, str(tmp_path))
    evaluation = CheckpointEvaluation(
        estimator, tf.estimator.TrainSpec(data, 9), tf.estimator.EvalSpec(data)
    )
    assert evaluation.run() == (None, [])  # no checkpoint yet
    for step, damaged in enumerate(["", "checkpoint", "model.ckpt-3.index", "model.ckpt-4.data"]):
        estimator.train(data, steps=1)
        if not damaged:
            metrics, _ = evaluation.run()
            assert metrics["global_step"] == 1
            continue
        for file in tmp_path.glob(f"{damaged}*"):
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2] if "model" in damaged else b"")
            for evaluate_now in (evaluation.run, evaluation.run_final):
                before, _ = evaluate_now()
                assert before["global_step"] == step
            file.write_bytes(whole)
        metrics, _ = evaluation.run()
        assert metrics["global_step"] == step + 1


def test_an_error_of_the_model_is_not_reported_as_damage(tmp_path: Path) -> None:
    def failing(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        if mode == tf.estimator.ModeKeys.EVAL:
            raise ValueError("of the user")
        return one_metric_model_fn(features, labels, mode)

    estimator = estimator_ext.Estimator(failing, str(tmp_path)).train(data, steps=1)
    spec = tf.estimator.TrainSpec(data, 9)
    with pytest.raises(ValueError, match="of the user"):
        CheckpointEvaluation(estimator, spec, tf.estimator.EvalSpec(data)).run()


@pytest.mark.parametrize("name", [None, "night"])
@pytest.mark.parametrize("evaluates", ["with the training", "as an evaluator"])
def test_a_worse_model_does_not_replace_the_best_export_after_a_restart(
    tmp_path: Path, evaluates: str, name: str | None
) -> None:
    exports = []
    for last in (2, 3, 6):  # the loss is smallest after step 3
        estimator = estimator_ext.Estimator(counting_model_fn, str(tmp_path))
        exporter = tf.estimator.BestExporter("best", receiver, exports_to_keep=1)
        specs = (
            tf.estimator.TrainSpec(data, max_steps=last),
            tf.estimator.EvalSpec(data, 1, name, exporters=exporter, throttle_secs=0),
        )
        if evaluates == "as an evaluator":
            estimator.train(data, max_steps=last)
            CheckpointEvaluation(estimator, *specs).run()
        else:
            estimator_ext.train_and_evaluate(estimator, *specs)
        (export,) = (tmp_path / "export" / "best").iterdir()
        exports.append(export.name)
        for events in Path(estimator.eval_dir(name)).glob("*.tfevents.*"):
            with events.open("ab") as file:
                file.write(b"a record that was being written")
    assert exports[0] != exports[1] == exports[2]


def counting_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    weight = tf.compat.v1.get_variable("weight", [], initializer=tf.zeros_initializer())
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, features * weight)
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(1.0).minimize(-weight, step)
    return tf.estimator.EstimatorSpec(mode, loss=(weight - 3.0) ** 2, train_op=train_op)


def receiver() -> Any:
    features = tf.compat.v1.placeholder(tf.float32, [None, 1])
    return tf.estimator.export.TensorServingInputReceiver(features, features)


# -- refused -------------------------------------------------------------------------------


def as_evaluator(
    monkeypatch: pytest.MonkeyPatch, index: int, listed: int
) -> estimator_ext.HostOffloadStrategy:
    """Returns the strategy of an evaluator whose cluster lists `listed` evaluators."""
    addresses = [f"127.0.0.1:{2000 + i}" for i in range(listed)]
    cluster = {"chief": ["127.0.0.1:1999"], "evaluator": addresses}
    config = {"cluster": cluster, "task": {"type": "evaluator", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    return estimator_ext.HostOffloadStrategy()


def blind_data() -> tf.data.Dataset:
    return data()


def one_metric_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    spec = model_fn(features, labels, mode)
    return spec._replace(eval_metric_ops={"mean": tf.compat.v1.metrics.mean(labels)})


def test_the_stock_function_refuses_a_second_evaluator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strategy = as_evaluator(monkeypatch, 1, 2)
    refusal = "there can only be one `evaluator` task"
    with pytest.raises(ValueError, match=refusal):
        evaluate(tf.estimator, strategy, tmp_path, tf.estimator.EvalSpec(data))


@pytest.mark.parametrize(
    ("index", "listed", "input_fn", "message"),
    [
        (0, 2, blind_data, "no argument input_context, so each example would be counted 2 times"),
        (2, 2, data, r"lists 2 addresses .*none of this task \(evaluator:2\)"),
        (1, 0, data, r"lists 0 addresses .*none of this task \(evaluator:1\)"),
    ],
)
def test_evaluators_that_cannot_divide_the_data(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    index: int,
    listed: int,
    input_fn: Any,
    message: str,
) -> None:
    strategy = as_evaluator(monkeypatch, index, listed)
    with pytest.raises(hostopt.ConfigError, match=message):
        evaluate(estimator_ext, strategy, tmp_path, tf.estimator.EvalSpec(input_fn))


def test_eval_specs_and_evaluators_that_do_not_match(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strategy = as_evaluator(monkeypatch, 0, 3)
    day, night = (tf.estimator.EvalSpec(data, name=name) for name in ("day", "night"))
    with pytest.raises(
        hostopt.ConfigError, match=r"evaluator 0 of 3 has the EvalSpecs \['day', 'night'\]"
    ):
        evaluate(estimator_ext, strategy, tmp_path, day, night)
    with pytest.raises(hostopt.ConfigError, match=r"named \['day', 'day'\]"):
        evaluate(estimator_ext, strategy, tmp_path, day, day)
    with pytest.raises(hostopt.ConfigError, match=r"named \[\]"):
        evaluate(estimator_ext, strategy, tmp_path)
    with pytest.raises(TypeError, match=r"must have type .*EvalSpec`.* Got: .*'str'"):
        evaluate(estimator_ext, strategy, tmp_path, day, "night")


def test_a_metric_that_cannot_be_summed_is_refused_by_name(tmp_path: Path) -> None:
    estimator = estimator_ext.Estimator(model_fn, str(tmp_path)).train(data, max_steps=1)
    ring = hostopt.connect(hostopt.Cluster.local())
    refusal = (
        r"metric 'largest_loss' cannot be summed over several evaluators: "
        r"its variable 'largest' changes by AssignVariableOp"
    )
    with (
        ring,
        with_evaluators(estimator, Evaluators(ring)) as shared,
        pytest.raises(hostopt.ConfigError, match=refusal),
    ):
        shared.evaluate(data, checkpoint_path=estimator.latest_checkpoint())


# -- which metrics can be summed -----------------------------------------------------------


def moving_average(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    variable = local("average")
    return tf.identity(variable), variable.assign_add((value - variable) * 0.1)


def was_there(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    variable = local("there", tf.bool)
    return tf.identity(variable), variable.assign(value > 0)


def largest_of_a_reference(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    variable = local("reference", use_resource=False)
    return variable + 0.0, tf.compat.v1.assign(variable, value)


def of_the_last_batch(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    dataset = tf.data.Dataset.from_tensors(1.0)
    return value + tf.compat.v1.data.make_one_shot_iterator(dataset).get_next(), tf.no_op()


def counted_in_python(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    counts = []
    update = tf.numpy_function(counts.append, [value], [])
    return tf.numpy_function(lambda: np.float32(len(counts)), [], tf.float32), update


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        (largest, "its variable 'largest' changes by AssignVariableOp"),
        (moving_average, "its variable 'average' grows by the values of variables"),
        (was_there, "its variable 'there' is of dtype bool"),
        (largest_of_a_reference, "its variable 'reference' changes by Assign "),
        (of_the_last_batch, "its result is computed from the last batch"),
        (counted_in_python, "PyFunc keeps its own state"),
    ],
)
def test_metrics_that_cannot_be_summed(metric: Any, why: str) -> None:
    with tf.Graph().as_default():
        value, _ = metric(tf.constant(1.0))
        with pytest.raises(hostopt.ConfigError, match=f"metric 'name' cannot .*: {why}"):
            find_summable({"name": value})


@pytest.mark.parametrize("use_resource", [True, False])
def test_metrics_that_can_be_summed(use_resource: bool) -> None:
    with tf.Graph().as_default():
        counted = local("counted", use_resource=use_resource)
        factor = local("factor", use_resource=use_resource)  # never changes
        tf.compat.v1.assign_add(counted, factor * 2.0)
        assert find_summable({"product": counted * factor}) == [counted]


def test_tensorflow_metrics_can_be_summed() -> None:
    metrics = tf.compat.v1.metrics
    with tf.Graph().as_default():
        labels, values = tf.constant([0, 1, 1]), tf.constant([0.1, 0.6, 0.4])
        digits = tf.cast(values > 0.5, tf.int32)
        result = {
            "auc": metrics.auc(labels, values),
            "false_negatives": metrics.false_negatives(labels, digits),
            "iou": metrics.mean_iou(labels, digits, 2),
            "mean_tensor": metrics.mean_tensor(values),
            "mse": metrics.mean_squared_error(values, 1 - values),
            "per_class": metrics.mean_per_class_accuracy(labels, digits, 2),
            "precision": metrics.precision(labels, digits),
            "precision_at": metrics.precision_at_thresholds(labels, values, [0.5]),
            "recall_at_k": metrics.recall_at_k(
                tf.cast(labels, tf.int64), tf.stack([values, 1 - values], 1), 1
            ),
            "rmse": metrics.root_mean_squared_error(values, 1 - values),
            "specificity": metrics.specificity_at_sensitivity(labels, values, 0.5),
        }
        variables = find_summable({name: value for name, (value, _) in result.items()})
        kept = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.METRIC_VARIABLES)
        assert [v.op.name for v in variables] == sorted(v.op.name for v in kept)


# -- evaluations ---------------------------------------------------------------------------


def announce_or_wait(evaluators: Evaluators, **note: Any) -> list[str | None]:
    """Starts an evaluation as evaluator 0; returns the checkpoint as another evaluator."""
    if evaluators.index > 0:
        return [evaluators.wait_for_checkpoint()]
    evaluators.announce(**note)
    return []


def test_an_evaluation_whose_checkpoint_is_deleted_on_one_evaluator(
    spawn_inproc: Spawn, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.ckpt-1")

    def run(communicator: hostopt.Communicator) -> list[str | None]:
        evaluators = Evaluators(communicator)
        if evaluators.index == 0:
            evaluators.announce()  # no checkpoint yet
        received = [] if evaluators.index == 0 else [evaluators.wait_for_checkpoint()]
        with (
            pytest.raises(hostopt.CheckpointError, match=r"worker:1 could not read .*ckpt-1"),
            evaluators.evaluation(path, str(tmp_path)),
        ):
            if evaluators.index == 1:
                raise tf.errors.NotFoundError(None, None, path)
            evaluators.confirm_restored()
        return received + announce_or_wait(evaluators, ended=True)

    received = ["model.ckpt-1", None]
    assert spawn_inproc(3, run) == [[], received, received]


def test_an_evaluation_that_fails_on_one_evaluator(spawn_inproc: Spawn, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt-1")

    def run(communicator: hostopt.Communicator) -> None:
        evaluators = Evaluators(communicator)
        if evaluators.index > 0:
            evaluators.wait_for_checkpoint()
        failure = ValueError("of the user") if evaluators.index == 0 else None
        expected = ValueError if failure else hostopt.PeerLostError
        with (
            pytest.raises(expected, match="of the user"),
            evaluators.evaluation(path, str(tmp_path)),
        ):
            evaluators.confirm_restored()
            if failure:  # although the checkpoint has been deleted
                raise failure
            communicator.barrier()
        with pytest.raises(hostopt.PeerLostError, match="of the user"):
            announce_or_wait(evaluators)

    spawn_inproc(3, run)


def test_an_evaluation_whose_result_cannot_be_written(spawn_inproc: Spawn, tmp_path: Path) -> None:
    """All evaluators raise the same CheckpointError."""

    def run(communicator: hostopt.Communicator) -> None:
        evaluators = Evaluators(communicator)
        if evaluators.index > 0:
            evaluators.wait_for_checkpoint()
        expected = pytest.raises(
            hostopt.CheckpointError, match=r"cannot write or read a file of .*No space"
        )
        with expected, evaluators.evaluation(str(tmp_path / "model.ckpt-1"), str(tmp_path)):
            evaluators.confirm_restored()
            if evaluators.index == 0:
                text = f"{tmp_path}/eval/events; No space left on device"
                raise tf.errors.ResourceExhaustedError(None, None, text)
            communicator.barrier()

    spawn_inproc(3, run)


def test_steps_are_divided_among_evaluators(spawn_inproc: Spawn) -> None:
    def run(communicator: hostopt.Communicator) -> tuple[int | None, int | None]:
        evaluators = Evaluators(communicator)
        with pytest.raises(hostopt.ConfigError, match=r"EvalSpec\.steps is 2 for 3 evaluators"):
            evaluators.local_steps(2)
        return evaluators.local_steps(None), evaluators.local_steps(8)

    assert spawn_inproc(3, run) == [(None, 3), (None, 3), (None, 2)]
