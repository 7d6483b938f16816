"""tf.contrib.predictor: functions that predict with a SavedModel or an estimator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v2 as tf


class Predictor:
    """A function from a dict of inputs to a dict of outputs, with a session of its own.

    The graph of the session has the tensors, which may be given by their names.
    """

    def __init__(
        self, session: Any, feed_tensors: Mapping[str, Any], fetch_tensors: Mapping[str, Any]
    ) -> None:
        self.session, self.graph = session, session.graph
        find = self.graph.as_graph_element
        self.feed_tensors = {name: find(each) for name, each in feed_tensors.items()}
        self.fetch_tensors = {name: find(each) for name, each in fetch_tensors.items()}

    def __call__(self, input_dict: Mapping[str, Any]) -> Any:
        """Returns arrays by the names of the outputs, for arrays by the names of the inputs."""
        unknown = sorted(input_dict.keys() - self.feed_tensors.keys())
        if unknown:
            names = sorted(self.feed_tensors)
            raise ValueError(f"The inputs are {names}, but {unknown} were passed")
        feeds = {self.feed_tensors[name]: value for name, value in input_dict.items()}
        return self.session.run(self.fetch_tensors, feeds)


def from_saved_model(
    export_dir: str,
    signature_def_key: str = "serving_default",
    *,
    tags: str = "serve",
    graph: tf.Graph | None = None,
    config: Any = None,
) -> Predictor:
    """Returns a function that predicts with a signature of a SavedModel.

    `tags` are separated by commas. A graph must be empty.
    """
    session = tf.compat.v1.Session(graph=graph or tf.Graph(), config=config)
    with session.graph.as_default():
        model = tf.compat.v1.saved_model.load(session, tags.split(","), export_dir)
    signature = model.signature_def[signature_def_key or "serving_default"]
    return Predictor(session, _names(signature.inputs), _names(signature.outputs))


def from_estimator(
    estimator: Any,
    serving_input_receiver_fn: Callable[[], Any],
    output_key: str | None = None,
    graph: tf.Graph | None = None,
    config: Any = None,
) -> Predictor:
    """Returns a function that predicts with the newest checkpoint of an estimator.

    The default of `output_key`, the name of an export output, is "serving_default", or the
    predictions of a model_fn without it. A graph must be empty.
    """
    checkpoint = estimator.latest_checkpoint()
    if checkpoint is None:
        raise ValueError(
            f"The estimator has no checkpoint in {estimator.model_dir!r}. Train it first"
        )
    with (graph or tf.Graph()).as_default():
        receiver = serving_input_receiver_fn()
        spec = estimator.model_fn(receiver.features, None, "infer", estimator.config)
        outputs = spec.predictions
        key = output_key or "serving_default"
        if output_key or key in (spec.export_outputs or {}):
            made = spec.export_outputs[key].as_signature_def(receiver.receiver_tensors)
            outputs = _names(made.outputs)
        creator = tf.compat.v1.train.ChiefSessionCreator(
            spec.scaffold, config=config, checkpoint_filename_with_path=checkpoint
        )
        session = tf.compat.v1.train.MonitoredSession(creator)
    return Predictor(session, receiver.receiver_tensors, outputs)


def _names(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {name: each.name for name, each in tensors.items()}
