"""All methods of an Estimator return the results of the stock class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from summaries import summaries

import estimator_ext

estimator_ext.install()


X = np.random.RandomState(0).standard_normal((10, 6, 3)).astype(np.float32)
Y = X.sum(-1, keepdims=True)
COLUMNS = [tf.feature_column.numeric_column("x", shape=[3])]


class Recorder(tf.estimator.SessionRunHook):
    """Records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def begin(self) -> None:
        self._events.append(f"{self._name} begins")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._events.append(f"{self._name} has a session")

    def before_run(self, run_context: Any) -> Any:
        return tf.estimator.SessionRunArgs(tf.compat.v1.train.get_global_step())

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._events.append(f"{self._name} runs")

    def end(self, session: Any) -> None:
        self._events.append(f"{self._name} ends at {self._step(session)}")

    @staticmethod
    def _step(session: Any) -> int:
        return int(session.run(tf.compat.v1.train.get_global_step()))


class Listener(tf.estimator.CheckpointSaverListener):
    """Records each save."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def before_save(self, session: Any, global_step_value: int) -> None:
        self._events.append(f"before the save of {global_step_value}")

    def after_save(self, session: Any, global_step_value: int) -> None:
        self._events.append(f"after the save of {global_step_value}")


def input_fn(params: dict[str, Any]) -> tf.data.Dataset:
    assert params["rate"] == 0.1
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).repeat(2)


def receiver() -> Any:
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def supervised_receiver() -> Any:
    x = tf.compat.v1.placeholder(tf.float32, [None, 3])
    y = tf.compat.v1.placeholder(tf.float32, [None, 1])
    return tf.estimator.experimental.build_raw_supervised_input_receiver_fn({"x": x}, y)()


def make_model_fn(events: list[str], start: float) -> Any:
    def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> Any:
        x = tf.compat.v1.feature_column.input_layer(features, COLUMNS)
        begin = tf.compat.v1.constant_initializer(start)
        weights = tf.compat.v1.get_variable("weights", [3, 1], initializer=begin)
        bias = tf.compat.v1.get_variable("bias", [1], initializer=begin)
        out = x @ weights + bias
        predictions = {"out": out, "twice": 2 * out}
        served = tf.estimator.export.PredictOutput({"out": out})
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(
                mode,
                predictions=predictions,
                export_outputs={"serving_default": served, "other": served},
                prediction_hooks=[Recorder("prediction hook of the spec", events)],
            )
        loss = tf.reduce_mean((out - labels) ** 2)
        metrics = {"error": tf.compat.v1.metrics.mean_absolute_error(labels, out)}
        tf.compat.v1.summary.scalar("own", loss * 2)
        step = tf.compat.v1.train.get_global_step()
        optimizer = tf.compat.v1.train.MomentumOptimizer(params["rate"], 0.9)

        def init_fn(scaffold: Any, session: Any) -> None:
            events.append("init_fn of the scaffold")

        return tf.estimator.EstimatorSpec(
            mode,
            predictions=predictions,
            loss=loss,
            train_op=optimizer.minimize(loss, step),
            eval_metric_ops=metrics,
            scaffold=tf.compat.v1.train.Scaffold(init_fn=init_fn),
            training_hooks=[Recorder("training hook of the spec", events)],
            training_chief_hooks=[Recorder("chief's hook of the spec", events)],
            evaluation_hooks=[Recorder("evaluation hook of the spec", events)],
        )

    return model_fn


def tags(directory: Path) -> set[tuple[str, int]]:
    """Returns the summaries that were written, with their steps, without speeds and times."""
    times = ("global_step/sec", "checkpoint_path", "step_ms/")
    return {(tag, step) for step, tag, _ in summaries(directory) if not tag.startswith(times)}


def exercise(kind: str, directory: Path) -> dict[str, Any]:
    """Makes all calls, and returns their results in this order."""
    result: dict[str, Any] = {}
    events: list[str] = []
    strategy = estimator_ext.HostOffloadStrategy() if kind == "ours, with a strategy" else None
    config = tf.estimator.RunConfig(
        save_checkpoints_steps=5,
        save_summary_steps=1,  # other intervals are counted from a read beside the update
        keep_checkpoint_max=2,
        train_distribute=strategy,
    )
    cls = tf.estimator.Estimator if kind == "stock" else estimator_ext.Estimator

    def make(name: str, start: float = 0.5, **more: Any) -> Any:
        model_fn = make_model_fn(events, start)
        model_dir = str(directory / name)
        return cls(model_fn, model_dir, config, {"rate": 0.1}, **more)

    estimator = make("model")
    hook = Recorder("hook of the call", events)
    estimator.train(input_fn, [hook], max_steps=12, saving_listeners=[Listener(events)])
    estimator.train(input_fn, steps=3)
    result["checkpoints"] = sorted(path.name for path in (directory / "model").glob("*.index"))
    result["latest"] = Path(estimator.latest_checkpoint()).name
    result["summaries"] = tags(directory / "model")
    result["variables"] = {
        n: estimator.get_variable_value(n) for n in estimator.get_variable_names()
    }
    result["metrics"] = estimator.evaluate(input_fn, 7, [hook], name="some")
    result["eval_dir"] = Path(estimator.eval_dir("some")).name
    result["evaluated"] = tags(Path(estimator.eval_dir("some")))
    older = str(directory / "model" / "model.ckpt-12")
    result["older"] = estimator.evaluate(input_fn, 7, checkpoint_path=older)
    result["predictions"] = list(estimator.predict(input_fn, ["out"], [hook]))
    result["batches"] = list(estimator.predict(input_fn, yield_single_examples=False))
    export = Path(estimator.export_saved_model(str(directory / "export"), receiver).decode())
    signatures = tf.saved_model.load(str(export)).signatures
    result["signatures"] = set(signatures)
    result["served"] = signatures["other"](x=tf.constant(X[0]))["out"].numpy()
    modes = tf.estimator.ModeKeys
    receivers = dict.fromkeys((modes.TRAIN, modes.EVAL), supervised_receiver)
    all_modes = estimator.experimental_export_all_saved_models(
        str(directory / "all"), {**receivers, modes.PREDICT: receiver}
    )
    result["all modes"] = {
        tag: set(tf.saved_model.load(all_modes.decode(), tags=[tag]).signatures)
        for tag in ("train", "eval", "serve")
    }
    warm = make("warm", 0.0, warm_start_from=str(directory / "model"))
    warm.train(input_fn, steps=1)
    result["warm"] = warm.get_variable_value("weights")
    exporters = [
        tf.estimator.BestExporter("best", receiver),
        tf.estimator.LatestExporter("latest", receiver),
        tf.estimator.FinalExporter("final", receiver),
    ]
    together = make("together")
    result["together"] = tf.estimator.train_and_evaluate(
        together,
        tf.estimator.TrainSpec(input_fn, 10, [Recorder("hook of TrainSpec", events)]),
        tf.estimator.EvalSpec(input_fn, 3, "e", [hook], exporters, 0, 0),
    )[0]
    exported = directory / "together" / "export"
    result["exported"] = {
        each.name: len(list(each.glob("*/saved_model.pb"))) for each in exported.iterdir()
    }
    result["events"] = events
    return result


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return exercise("stock", tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("kind", ["ours", "ours, with a strategy"])
def test_every_call_does_what_it_does_in_the_stock_class(
    stock: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    ours = exercise(kind, tmp_path)
    assert list(ours) == list(stock)
    for name, expectation in stock.items():
        if name == "events":
            assert ours[name] == expectation
            continue
        tf.nest.assert_same_structure(ours[name], expectation)
        for result, expected in zip(tf.nest.flatten(ours[name]), tf.nest.flatten(expectation)):
            if isinstance(expected, (np.ndarray, np.floating)):
                np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6, err_msg=name)
            else:
                assert result == expected, name
