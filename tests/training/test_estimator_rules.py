"""The accelerator estimator's rules: batch sizes, datasets, metrics, loops, prediction."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf
from harness import deadline_s, reserved_addresses
from rule_models import (
    BATCH,
    FEATURES,
    MODES,
    Losses,
    X,
    Y,
    data,
    evaluate,
    make_estimator,
    model_fn,
)

import estimator_ext
import hostopt

estimator_ext.install()


@pytest.fixture
def two_workers() -> Iterator[list[Any]]:
    """The strategies of two workers that have not connected yet."""
    with reserved_addresses(2) as addresses:
        cluster = tf.train.ClusterSpec({"worker": addresses})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver
        yield [
            estimator_ext.HostOffloadStrategy(
                resolver(cluster, task_type="worker", task_id=rank),
                collective_timeout_s=deadline_s(30),
            )
            for rank in range(2)
        ]


# -- global batch sizes --------------------------------------------------------------------


def note_batch_sizes(observed: list[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a model_fn and an input_fn that record the batch size of each mode."""

    def noting_model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        observed.append(("model_fn", mode, params.get("batch_size")))
        return model_fn(features, labels, mode)

    def input_fn(mode: str, params: Any) -> tf.data.Dataset:
        observed.append(("input_fn", mode, params.get("batch_size")))
        return data(2)()

    return noting_model_fn, input_fn


def test_each_mode_has_its_batch_size_in_params(tmp_path: Path) -> None:
    observed: list[Any] = []
    build, input_fn = note_batch_sizes(observed)
    params = {"rate": 0.1}
    estimator = make_estimator(
        tmp_path, build, params=params, train_batch_size=8, eval_batch_size=6, predict_batch_size=5
    )
    estimator.train(input_fn)
    estimator.evaluate(input_fn)
    list(estimator.predict(input_fn))
    sizes = {MODES.TRAIN: 8, MODES.EVAL: 6, MODES.PREDICT: 5}
    assert observed == [
        (place, mode, size) for mode, size in sizes.items() for place in ("input_fn", "model_fn")
    ]
    assert params == estimator.params == {"rate": 0.1}


def test_params_are_unchanged_without_a_batch_size(tmp_path: Path) -> None:
    observed: list[Any] = []
    build, input_fn = note_batch_sizes(observed)
    make_estimator(tmp_path, build, params={"batch_size": 3}).train(input_fn)
    assert {size for _, _, size in observed} == {3}


def test_workers_share_the_training_batch_and_one_evaluates(
    tmp_path: Path, two_workers: list[Any]
) -> None:
    observed: list[list[Any]] = [[], []]
    # two workers in one process; each needs threads to wait for the other
    threads_each = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=8, use_per_session_threads=True
    )

    def run(rank: int) -> None:
        build, input_fn = note_batch_sizes(observed[rank])
        estimator = make_estimator(
            tmp_path,
            build,
            train_distribute=two_workers[rank],
            session_config=threads_each,
            params={},
            train_batch_size=8,
            eval_batch_size=6,
        )
        estimator.train(input_fn, steps=1)
        estimator.evaluate(input_fn)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s(60))
    for strategy in two_workers:
        strategy.close()
    one = [
        (place, mode, size)
        for mode, size in ((MODES.TRAIN, 4), (MODES.EVAL, 6))
        for place in ("input_fn", "model_fn")
    ]
    assert observed == [one, one]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"train_batch_size": 0}, "train_batch_size is 0, wanted a whole number above 0"),
        ({"eval_batch_size": -2}, "eval_batch_size is -2, wanted a whole number above 0"),
        ({"predict_batch_size": 2.0}, r"predict_batch_size is 2\.0, wanted a whole number"),
        ({"train_batch_size": True}, "train_batch_size is True, wanted a whole number"),
        ({"eval_batch_size": 4, "params": {"batch_size": 8}}, "8 and eval_batch_size is given"),
        ({"params": {"input_fn": 1}}, "'input_fn' is reserved"),
    ],
)
def test_invalid_batch_sizes_and_params(
    tmp_path: Path, options: dict[str, Any], rule: str
) -> None:
    def build(features: Any, labels: Any, mode: str, params: Any) -> None:
        """Must not be called."""

    with pytest.raises(ValueError, match=rule):
        make_estimator(tmp_path, build, **options)


def test_a_batch_that_cannot_be_divided_among_workers(
    tmp_path: Path, two_workers: list[Any]
) -> None:
    options = {"train_distribute": two_workers[0], "eval_batch_size": 7}
    with pytest.raises(ValueError, match="is 7, wanted a multiple of the number of workers, 2"):
        make_estimator(tmp_path, train_batch_size=7, **options)
    make_estimator(tmp_path, train_batch_size=8, **options)


def test_an_input_fn_without_params_is_refused(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, train_batch_size=8)
    with pytest.raises(ValueError, match=r"no argument params.*train_batch_size is given"):
        estimator.train(data(1))
    estimator.evaluate(data(1))  # no batch size in this mode


# -- results of input_fn -------------------------------------------------------------------


def tensors() -> Any:
    return tf.constant(X[:BATCH]), tf.constant(Y[:BATCH])


def test_tensors_instead_of_a_dataset(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path)
    for run in (estimator.train, estimator.evaluate, lambda fn: next(estimator.predict(fn))):
        with pytest.raises(ValueError, match=r"input_fn must return Dataset: got a tuple"):
            run(tensors)


ASKED_FOR = [
    {"strict": True},
    {"iterations_per_loop": 2},
    {"train_batch_size": 4},
    {"eval_batch_size": 4},
    {"predict_batch_size": 4},
]


@pytest.mark.parametrize("options", ASKED_FOR)
def test_strict_rules_must_be_enabled(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"strict": False, **options}
    with pytest.raises(ValueError, match="'input_fn' is reserved"):
        make_estimator(tmp_path, build_with_params, params={"input_fn": 1}, **options)
    estimator = make_estimator(tmp_path, build_with_params, **options)
    for run in (estimator.train, estimator.evaluate, lambda fn: next(estimator.predict(fn))):
        with pytest.raises(
            ValueError, match=r"input_fn must return Dataset: got a tuple.*or leave"
        ):
            run(lambda params: tensors())
    with pytest.raises(ValueError, match="must contain either eval_metrics or eval_metric_ops"):
        estimator.evaluate(lambda params: data(1)())


def build_with_params(features: Any, labels: Any, mode: str, params: Any) -> Any:
    loss = tf.reduce_mean(features)
    step = tf.compat.v1.train.get_global_step()
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=step.assign_add(1))


def test_stock_rules_apply_by_default(tmp_path: Path) -> None:
    def results_of(estimator: Any) -> list[Any]:
        tf.keras.utils.set_random_seed(1)
        estimator.train(tensors, steps=3)
        metrics = estimator.evaluate(tensors, steps=2)
        predictions = estimator.predict(lambda: tensors()[0])
        return [metrics, *[next(predictions)["y"] for _ in range(BATCH + 1)]]

    result = results_of(make_estimator(tmp_path / "ours", strict=False))
    config = tf.estimator.RunConfig(tf_random_seed=1)
    stock = tf.estimator.Estimator(model_fn, str(tmp_path / "stock"), config)
    expected = results_of(stock)
    assert result[0] == expected[0]
    np.testing.assert_array_equal(result[1:], expected[1:])
    # no metrics, and a reserved name
    loose = make_estimator(
        tmp_path / "loose", build_with_params, strict=False, params={"input_fn": 1}
    )
    loose.train(tensors, steps=2)
    assert set(loose.evaluate(tensors, steps=1)) == {"loss", "global_step"}


@pytest.mark.parametrize("strict", [False, True])
def test_tensors_cannot_be_prefetched(tmp_path: Path, strict: bool) -> None:
    estimator = make_estimator(tmp_path, strict=strict, prefetch_depth=2)
    rule = "prefetch_depth is 2 and input_fn returned a tuple, wanted a tf.data.Dataset"
    with pytest.raises(ValueError, match="must return Dataset" if strict else rule):
        estimator.train(tensors, steps=1)


def test_a_dataset_of_triples(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Dataset of tuples of 3, wanted features or"):
        make_estimator(tmp_path).train(lambda: tf.data.Dataset.from_tensors((X, Y, Y)))


@pytest.mark.parametrize(
    ("element", "features", "labels"),
    [
        (X, "array", "None"),
        ({"x": X, "z": Y}, "dict x z", "None"),
        ((X, Y), "array", "array"),
        (({"x": X}, {"y": Y}), "dict x", "dict y"),
    ],
)
def test_datasets_of_features_and_labels(
    tmp_path: Path, element: Any, features: str, labels: str
) -> None:
    result = []

    def describe(value: Any) -> str:
        if isinstance(value, dict):
            return " ".join(["dict", *sorted(value)])
        return "None" if value is None else "array"

    def build(features: Any, labels: Any, mode: str) -> Any:
        result.append((describe(features), describe(labels)))
        loss = tf.reduce_mean(tf.nest.flatten(features)[0])
        metrics = {"mean": tf.compat.v1.metrics.mean(loss)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    make_estimator(tmp_path, build).evaluate(lambda: tf.data.Dataset.from_tensors(element))
    assert result == [(features, labels)]


def test_labels_that_model_fn_does_not_accept(tmp_path: Path) -> None:
    def build(features: tf.Tensor, mode: str) -> None:
        """Must not be called."""

    rule = "model_fn does not take labels, but input_fn returns labels"
    for run in (make_estimator(tmp_path, build).train, make_estimator(tmp_path, build).evaluate):
        with pytest.raises(ValueError, match=rule):
            run(data(1))


def test_stock_rules_apply_to_a_stock_configuration(tmp_path: Path) -> None:
    def build(features: Any, labels: Any, mode: str, params: Any) -> Any:
        assert params == {"input_fn": 1}
        step = tf.compat.v1.train.get_global_step()
        loss = tf.reduce_mean(features - labels)
        return estimator_ext.EstimatorSpec(mode, loss=loss, train_op=step.assign_add(1))

    config = tf.estimator.RunConfig()
    estimator = estimator_ext.Estimator(build, str(tmp_path), config, params={"input_fn": 1})
    estimator.train(tensors, steps=2)
    assert estimator.evaluate(tensors, steps=1)["global_step"] == 2  # without metrics


# -- metrics -------------------------------------------------------------------------------


@pytest.mark.parametrize("as_dict", [False, True])
def test_eval_metrics_cover_all_batches(tmp_path: Path, as_dict: bool) -> None:
    def metrics(features: tf.Tensor, labels: tf.Tensor) -> dict[str, Any]:
        positive = features[:, :1] > 0
        return {
            "mean": tf.compat.v1.metrics.mean(labels),
            "accuracy": tf.compat.v1.metrics.accuracy(labels > 1, positive),
        }

    def spec(mode: str, loss: tf.Tensor, features: tf.Tensor, labels: tf.Tensor) -> Any:
        named = {"features": features, "labels": labels}
        call = (metrics, named if as_dict else [features, labels])
        return estimator_ext.EstimatorSpec(mode, loss=loss, eval_metrics=call)

    result = evaluate(tmp_path, spec)
    rows = slice(3 * BATCH - 1)
    np.testing.assert_allclose(result["mean"], Y[rows].mean(), rtol=1e-6)
    right = ((Y[rows] > 1) == (X[rows, :1] > 0)).mean()
    np.testing.assert_allclose(result["accuracy"], right, rtol=1e-6)


@pytest.mark.parametrize("kind", [estimator_ext.EstimatorSpec, tf.estimator.EstimatorSpec])
def test_an_evaluation_without_metrics(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ValueError, match="must contain either eval_metrics or eval_metric_ops"):
        evaluate(tmp_path, lambda mode, loss, *_: kind(mode, loss=loss))


def test_an_evaluation_with_both_kinds_of_metrics(tmp_path: Path) -> None:
    def spec(mode: str, loss: tf.Tensor, *_: tf.Tensor) -> Any:
        mean = {"mean": tf.compat.v1.metrics.mean(loss)}
        return estimator_ext.EstimatorSpec(
            mode, loss=loss, eval_metric_ops=mean, eval_metrics=(lambda: mean, [])
        )

    with pytest.raises(ValueError, match="cannot contain both eval_metrics and eval_metric_ops"):
        evaluate(tmp_path, spec)


@pytest.mark.parametrize("missing", ["loss", "train_op", "predictions"])
@pytest.mark.parametrize("wrong_mode", [False, True])
def test_a_missing_field_is_named(tmp_path: Path, missing: str, wrong_mode: bool) -> None:
    def build(features: tf.Tensor, mode: str) -> Any:
        loss = tf.reduce_mean(features)
        fields = {"loss": loss, "train_op": loss, "predictions": loss}
        if wrong_mode:  # a mode in which the field may be missing
            mode = MODES.TRAIN if missing == "predictions" else MODES.PREDICT
        return estimator_ext.EstimatorSpec(
            mode, **{name: value for name, value in fields.items() if name != missing}
        )

    estimator = make_estimator(tmp_path, build)
    with pytest.raises(ValueError, match=f"Missing {missing}"):
        if missing == "predictions":
            next(estimator.predict(data(1, features_only=True)))
        else:
            estimator.train(data(1, features_only=True))


# -- iterations_per_loop -------------------------------------------------------------------


def test_invalid_numbers_of_iterations(two_workers: list[Any]) -> None:
    with pytest.raises(hostopt.ConfigError, match="per_loop is 3, wanted 1 with 2 workers"):
        estimator_ext.RunConfig(train_distribute=two_workers[0], iterations_per_loop=3)
    with pytest.raises(hostopt.ConfigError, match="wanted 1 with accumulate_steps=2"):
        estimator_ext.RunConfig(
            train_distribute=estimator_ext.HostOffloadStrategy(),
            iterations_per_loop=3,
            accumulate_steps=2,
        )
    for value in (0, -1, 2.0, None, True):
        with pytest.raises(ValueError, match=r"iterations_per_loop is .*, wanted a whole number"):
            estimator_ext.RunConfig(iterations_per_loop=value)


# -- num_predictions -----------------------------------------------------------------------


def test_the_number_of_predictions_is_limited(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path)
    hook = Losses()
    hook.begin = hook.before_run = hook.after_run = lambda *_: None  # type: ignore[method-assign]
    repeat_last_batch = lambda: data(50, features_only=True)().repeat()  # noqa: E731
    result = list(estimator.predict(repeat_last_batch, hooks=[hook], num_predictions=6))
    np.testing.assert_array_equal([each["x"] for each in result], X[:6])
    assert hook.ended == 1
    keyed = estimator.predict(repeat_last_batch, ["x"], num_predictions=BATCH)
    np.testing.assert_array_equal([each["x"] for each in keyed], X[:BATCH])


def test_a_limit_larger_than_the_number_of_predictions(tmp_path: Path) -> None:
    input_fn = data(2, features_only=True)
    assert len(list(make_estimator(tmp_path).predict(input_fn, num_predictions=100))) == 2 * BATCH


@pytest.mark.parametrize(("number", "batches"), [(1, 1), (4, 1), (5, 2), (8, 2), (100, 3)])
def test_predictions_are_limited_in_batches(tmp_path: Path, number: int, batches: int) -> None:
    result = make_estimator(tmp_path).predict(
        data(3, features_only=True), yield_single_examples=False, num_predictions=number
    )
    np.testing.assert_array_equal(
        [batch["x"] for batch in result], X.reshape(-1, BATCH, 3)[:batches]
    )


def test_the_session_is_closed_after_the_last_prediction(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path)
    for _ in range(2):  # after exactly that many predictions, predict can be called again
        result = estimator.predict(data(9, features_only=True), num_predictions=2)
        np.testing.assert_array_equal([next(result)["x"], next(result)["x"]], X[:2])


@pytest.mark.parametrize("number", [0, -1, 1.0, True])
def test_invalid_numbers_of_predictions(tmp_path: Path, number: Any) -> None:
    with pytest.raises(ValueError, match=r"num_predictions is .*, wanted a whole number above 0"):
        make_estimator(tmp_path).predict(data(1, features_only=True), num_predictions=number)


# -- prefetch_depth ------------------------------------------------------------------------


def test_batches_are_prefetched(tmp_path: Path) -> None:
    made, enough = [], threading.Event()

    def batches() -> Iterator[Any]:
        for begin in range(0, 400, BATCH):
            made.append(begin)
            if len(made) >= 4:
                enough.set()
            yield X[begin : begin + BATCH], Y[begin : begin + BATCH]

    def input_fn() -> tf.data.Dataset:
        kinds = tuple(tf.TensorSpec([BATCH, n], tf.float64) for n in (FEATURES, 1))
        return tf.data.Dataset.from_generator(batches, output_signature=kinds)

    class Wait(tf.estimator.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            assert enough.wait(30)  # after one step there are three more batches

    make_estimator(tmp_path, strict=False, prefetch_depth=3).train(
        input_fn, steps=1, hooks=[Wait()]
    )
    assert len(made) <= 1 + 3 + 1  # one that was used, and one being computed


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_invalid_prefetch_depths(depth: Any) -> None:
    with pytest.raises(ValueError, match=r"prefetch_depth is .*, wanted a whole number above 0"):
        estimator_ext.RunConfig(prefetch_depth=depth)


def test_the_configuration_returns_its_arguments() -> None:
    config = estimator_ext.RunConfig(iterations_per_loop=5, prefetch_depth=2)
    assert (config.iterations_per_loop, config.prefetch_depth) == (5, 2)
    config = estimator_ext.RunConfig(strict=True).replace(model_dir="somewhere")
    assert (config.iterations_per_loop, config.prefetch_depth) == (1, None)
    assert config.strict
    assert not estimator_ext.RunConfig().strict
