"""Several evaluators: what they measure together, and what they refuse."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import Spawn
from ranks import Rank, Ranks, reserved_addresses

import estimator_ext
import hostopt
from estimator_ext.evaluators import Evaluators, with_evaluators
from estimator_ext.metric_sums import find_summable
from estimator_ext.training import _Evaluation

estimator_ext.install()

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(180)]

COUNTS = ("confusion", "true_positives", "global_step")


@pytest.fixture
def started(tmp_path: Path, ranks: Ranks) -> Iterator[Any]:
    """`started(count, **settings)`: a chief and `count` evaluators, which the cluster lists."""
    with reserved_addresses(4) as addresses:

        def start(count: int, own: dict[str, Any] | None = None, **settings: Any) -> list[Rank]:
            jobs = {"chief": addresses[:1], "evaluator": addresses[1 : 1 + count]}
            arguments = [json.dumps({"model_dir": str(tmp_path / "model"), **settings})]
            more = {name: [json.dumps(value)] for name, value in (own or {}).items()}
            return ranks.start("evaluate.py", jobs, arguments=arguments, own=more)

        yield start


def result_of(rank: Rank) -> Any:
    """What train_and_evaluate returned in a process."""
    (line,) = [line for line in rank.output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line[len("RESULT") :])


def evaluated_steps(eval_dir: Path) -> list[int]:
    """Steps for which an evaluation wrote an accuracy, once for each writer."""
    return [
        event.step
        for path in eval_dir.glob("events.*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "accuracy"
    ]


def test_three_evaluators_measure_what_one_measures(tmp_path: Path, started: Any) -> None:
    chief, *evaluators = started(3)
    for rank in (chief, *evaluators):
        assert rank.wait() == 0, rank.output
    found = [result_of(rank) for rank in evaluators]
    (alone,) = found[0][1]  # by an exporter, which evaluator 0 alone has called
    assert [exports for _, exports in found[1:]] == [[], []]
    assert np.sum(alone["confusion"]) == 10_000
    for together, _ in found:
        assert set(together) == set(alone)
        for name, value in alone.items():
            tolerance = 0 if name in COUNTS else 1e-6
            np.testing.assert_allclose(together[name], value, 0, tolerance, err_msg=name)
    # one writer
    assert evaluated_steps(tmp_path / "model" / "eval").count(20) == 1
    assert len(list((tmp_path / "model" / "eval").glob("events.*"))) == 1


def test_each_evaluator_has_an_eval_spec_of_its_own(tmp_path: Path, started: Any) -> None:
    chief, few, everything = started(2, specs="named", metric="largest")
    for rank, count in ((few, 300), (everything, 10_000)):
        assert rank.wait() == 0, rank.output
        metrics, _ = result_of(rank)
        assert np.sum(metrics["confusion"]) == count
    assert chief.wait() == 0, chief.output
    for name in ("few", "all"):
        assert evaluated_steps(tmp_path / "model" / f"eval_{name}")[-1] == 20


def test_a_killed_evaluator_ends_the_others_but_not_the_training(started: Any) -> None:
    chief, first, second, third = started(3, own={"evaluator:1": {"stop": True}})
    second.wait_for_output("stopped here")
    second.signal(signal.SIGKILL)
    for rank in (first, third):
        assert rank.wait() == 200, rank.output
        assert "PeerLostError" in rank.output
        assert "rank 1 (evaluator:1, 127.0.0.1:" in rank.output
    assert chief.wait() == 0, chief.output


def test_one_process_evaluates_all_eval_specs(tmp_path: Path) -> None:
    specs = [tf.estimator.EvalSpec(blind_data, name=name) for name in ("day", "night")]
    metrics, exports = evaluate(estimator_ext, None, tmp_path, *specs)
    assert [(name, found["global_step"]) for name, found in metrics.items()] == [
        ("day", 1),
        ("night", 1),
    ]
    assert exports == {"day": [], "night": []}


def test_a_damaged_checkpoint_is_left_out_and_the_next_one_evaluated(tmp_path: Path) -> None:
    estimator = estimator_ext.Estimator(one_metric_model_fn, str(tmp_path))
    evaluation = _Evaluation(
        estimator, tf.estimator.TrainSpec(data, 9), tf.estimator.EvalSpec(data)
    )
    assert evaluation.run() == (None, [])  # nothing yet
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


def test_an_error_of_the_model_is_no_damage(tmp_path: Path) -> None:
    def failing(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        if mode == tf.estimator.ModeKeys.EVAL:
            raise ValueError("of the user")
        return one_metric_model_fn(features, labels, mode)

    estimator = estimator_ext.Estimator(failing, str(tmp_path)).train(data, steps=1)
    spec = tf.estimator.TrainSpec(data, 9)
    with pytest.raises(ValueError, match="of the user"):
        _Evaluation(estimator, spec, tf.estimator.EvalSpec(data)).run()


# -- what is refused -----------------------------------------------------------------------


def as_evaluator(
    monkeypatch: pytest.MonkeyPatch, index: int, listed: int
) -> estimator_ext.HostOffloadStrategy:
    """The strategy of an evaluator of a cluster that lists so many."""
    addresses = [f"127.0.0.1:{2000 + i}" for i in range(listed)]
    cluster = {"chief": ["127.0.0.1:1999"], "evaluator": addresses}
    config = {"cluster": cluster, "task": {"type": "evaluator", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    return estimator_ext.HostOffloadStrategy()


def data(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]]))


def blind_data() -> tf.data.Dataset:
    return data()


def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    weight = tf.compat.v1.get_variable("weight", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(features, weight) - labels))
    step = tf.compat.v1.train.get_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    metrics = {"largest_loss": largest(loss)} if mode == tf.estimator.ModeKeys.EVAL else None
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def one_metric_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    spec = model_fn(features, labels, mode)
    return spec._replace(eval_metric_ops={"mean": tf.compat.v1.metrics.mean(labels)})


def evaluate(
    api: Any, strategy: estimator_ext.HostOffloadStrategy | None, model_dir: Path, *specs: Any
) -> Any:
    config = estimator_ext.RunConfig(train_distribute=strategy)
    estimator = estimator_ext.Estimator(model_fn, str(model_dir), config)
    eval_spec = specs[0] if len(specs) == 1 else list(specs)
    return api.train_and_evaluate(estimator, tf.estimator.TrainSpec(data, 1), eval_spec)


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
        (0, 2, blind_data, "no argument input_context, so 2 evaluators would count each example"),
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
    with pytest.raises(hostopt.ConfigError, match=r"evaluator 0 of 3 finds .*'day', 'night'"):
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


def local(name: str, dtype: tf.DType = tf.float32, **options: Any) -> tf.Variable:
    kinds = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    zeros = tf.compat.v1.zeros_initializer()
    return tf.compat.v1.get_variable(name, [], dtype, zeros, collections=kinds, **options)


def largest(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
    variable = local("largest")
    return tf.identity(variable), variable.assign(tf.maximum(variable, value))


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
        (moving_average, "its variable 'average' grows by what such variables hold"),
        (was_there, "its variable 'there' is of dtype bool"),
        (largest_of_a_reference, "its variable 'reference' changes by Assign "),
        (of_the_last_batch, "it is made of the last batch"),
        (counted_in_python, "PyFunc keeps what it has counted"),
    ],
)
def test_what_cannot_be_summed(metric: Any, why: str) -> None:
    with tf.Graph().as_default():
        value, _ = metric(tf.constant(1.0))
        with pytest.raises(hostopt.ConfigError, match=f"metric 'name' cannot .*: {why}"):
            find_summable({"name": value})


@pytest.mark.parametrize("use_resource", [True, False])
def test_what_can_be_summed(use_resource: bool) -> None:
    with tf.Graph().as_default():
        counted = local("counted", use_resource=use_resource)
        factor = local("factor", use_resource=use_resource)  # which never changes
        tf.compat.v1.assign_add(counted, factor * 2.0)
        assert find_summable({"product": counted * factor}) == [counted]


def test_metrics_of_tensorflow_can_be_summed() -> None:
    metrics = tf.compat.v1.metrics
    with tf.Graph().as_default():
        labels, values = tf.constant([0, 1, 1]), tf.constant([0.1, 0.6, 0.4])
        digits = tf.cast(values > 0.5, tf.int32)
        found = {
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
        variables = find_summable({name: value for name, (value, _) in found.items()})
        kept = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.METRIC_VARIABLES)
        assert [v.op.name for v in variables] == sorted(v.op.name for v in kept)


# -- rounds --------------------------------------------------------------------------------


def hear_or_say(evaluators: Evaluators, **note: Any) -> list[str | None]:
    """Begin a round as evaluator 0, or what the others hear of it."""
    if evaluators.index > 0:
        return [evaluators.hear()]
    evaluators.say(**note)
    return []


def test_a_round_in_which_one_finds_the_checkpoint_deleted(
    spawn_inproc: Spawn, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.ckpt-1")

    def run(communicator: hostopt.Communicator) -> list[str | None]:
        evaluators = Evaluators(communicator)
        if evaluators.index == 0:
            evaluators.say()  # nothing yet
        heard = [] if evaluators.index == 0 else [evaluators.hear()]
        with (
            pytest.raises(hostopt.CheckpointError, match=r"worker:1 could not read .*ckpt-1"),
            evaluators.round(path, str(tmp_path)),
        ):
            if evaluators.index == 1:
                raise tf.errors.NotFoundError(None, None, path)
            evaluators.have_read()
        return heard + hear_or_say(evaluators, ended=True)

    heard = ["model.ckpt-1", None]
    assert spawn_inproc(3, run) == [[], heard, heard]


def test_a_round_in_which_one_fails(spawn_inproc: Spawn, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt-1")

    def run(communicator: hostopt.Communicator) -> None:
        evaluators = Evaluators(communicator)
        if evaluators.index > 0:
            evaluators.hear()
        failure = ValueError("of the user") if evaluators.index == 0 else None
        wanted = ValueError if failure else hostopt.PeerLostError
        with pytest.raises(wanted, match="of the user"), evaluators.round(path, str(tmp_path)):
            evaluators.have_read()
            if failure:  # though the checkpoint is gone meanwhile
                raise failure
            communicator.barrier()
        with pytest.raises(hostopt.PeerLostError, match="of the user"):
            hear_or_say(evaluators)

    spawn_inproc(3, run)


def test_a_round_in_which_one_cannot_write(spawn_inproc: Spawn, tmp_path: Path) -> None:
    """All raise the same, typed."""

    def run(communicator: hostopt.Communicator) -> None:
        evaluators = Evaluators(communicator)
        if evaluators.index > 0:
            evaluators.hear()
        wanted = pytest.raises(
            hostopt.CheckpointError, match=r"cannot write or read a file of .*No space"
        )
        with wanted, evaluators.round(str(tmp_path / "model.ckpt-1"), str(tmp_path)):
            evaluators.have_read()
            if evaluators.index == 0:
                text = f"{tmp_path}/eval/events; No space left on device"
                raise tf.errors.ResourceExhaustedError(None, None, text)
            communicator.barrier()

    spawn_inproc(3, run)


def test_steps_are_divided(spawn_inproc: Spawn) -> None:
    def run(communicator: hostopt.Communicator) -> tuple[int | None, int | None]:
        evaluators = Evaluators(communicator)
        with pytest.raises(hostopt.ConfigError, match=r"EvalSpec\.steps is 2 for 3 evaluators"):
            evaluators.share(2)
        return evaluators.share(None), evaluators.share(8)

    assert spawn_inproc(3, run) == [(None, 3), (None, 3), (None, 2)]
