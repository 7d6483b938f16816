"""Every canned estimator, on the data of the census tutorial."""

import numpy as np
import tensorflow as tf
from arguments import read_arguments
from wide_deep import make_columns, read_data

v1, estimators = tf.compat.v1, tf.estimator


def columns_of(kind):
    wide, deep, _ = make_columns()
    if "Combined" in kind:
        return {
            "linear_feature_columns": wide,
            "dnn_feature_columns": deep,
            "dnn_hidden_units": [16, 8],
        }
    if kind.startswith("DNN"):
        return {"feature_columns": deep, "hidden_units": [16, 8]}
    if kind.startswith("BoostedTrees"):
        return {"feature_columns": [wide[2]], "n_batches_per_layer": 2, "n_trees": 3}
    return {"feature_columns": wide} if kind.startswith("Linear") else {}


def make_estimator(name, model_dir):
    """Makes the estimator of a name such as DNNClassifier, v1.DNNClassifier or DNNEstimator."""
    config = estimators.RunConfig(model_dir, tf_random_seed=3)
    kind = name.rpartition(".")[2]
    if kind == "KMeans":
        return v1.estimator.experimental.KMeans(
            3, feature_columns=make_columns()[1][:2], config=config, use_mini_batch=True
        )
    if kind == "LinearSDCA":
        sdca = v1.estimator.experimental.LinearSDCA("key", symmetric_l2_regularization=1.0)
        return v1.estimator.LinearClassifier([make_columns()[1][0]], optimizer=sdca, config=config)
    if kind == "RNNClassifier":
        words = tf.feature_column.sequence_categorical_column_with_hash_bucket("words", 20)
        embedded = tf.feature_column.embedding_column(words, 4)
        return estimators.experimental.RNNClassifier([embedded], units=[6], config=config)
    options = columns_of(kind)
    if kind.endswith("Estimator"):
        options["head"] = {
            "LinearEstimator": estimators.BinaryClassHead,
            "DNNEstimator": lambda: estimators.MultiHead(
                [estimators.BinaryClassHead(name="rich"), estimators.RegressionHead(name="hours")]
            ),
            "DNNLinearCombinedEstimator": estimators.PoissonRegressionHead,
            "BaselineEstimator": estimators.LogisticRegressionHead,
        }[kind]()
    return getattr(v1.estimator if name != kind else estimators, kind)(config=config, **options)


def main():
    args = read_arguments(names={"nargs": "+"})
    features, rich = read_data()
    hours = (features["hours"] / 60).astype(np.float32)
    features["words"] = np.stack([features["job"], features["town"]], 1)
    for name in args.names:
        labels = rich
        if name.endswith("Regressor") or name == "DNNLinearCombinedEstimator":
            labels = hours
        elif name == "DNNEstimator":
            labels = {"rich": rich[:, None], "hours": hours[:, None]}

        def input_fn(repeats=None, name=name, labels=labels):
            data = tf.data.Dataset.from_tensor_slices((features, labels))
            data = data.repeat(repeats).batch(args.batch_size, drop_remainder=True)
            if name == "KMeans":
                return data.map(lambda x, y: x)
            if "RNN" in name:
                return data.map(lambda x, y: ({"words": tf.sparse.from_dense(x["words"])}, y))
            if "SDCA" in name:
                return data.map(lambda x, y: ({**x, "key": tf.strings.as_string(x["age"])}, y))
            return data

        estimator = make_estimator(name, f"{args.model_dir}/{name}")
        estimator.train(input_fn, max_steps=args.steps)
        metrics = estimator.evaluate(lambda input_fn=input_fn: input_fn(1))
        print(name, {key: float(value) for key, value in metrics.items()})


if __name__ == "__main__":
    main()
