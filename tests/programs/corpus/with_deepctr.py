"""Click prediction with all estimators of DeepCTR, as in its documentation."""

import os

import numpy as np
import pandas as pd
import tensorflow as tf
from arguments import read_arguments
from deepctr import estimator as models
from deepctr.estimator.inputs import input_fn_pandas
from tensorflow.python.ops.parsing_ops import FixedLenFeature

SPARSE = {"user": 30, "item": 40, "city": 7, "device": 3}
DENSE = ["age", "price"]
ROWS = 640


def read_data():
    random = np.random.RandomState(7)
    data = {name: random.randint(0, size, ROWS) for name, size in SPARSE.items()}
    data.update({name: random.standard_normal(ROWS).astype(np.float32) for name in DENSE})
    score = data["age"] - data["price"] + (data["user"] % 3) - (data["item"] % 2)
    data["click"] = (score > 0.5).astype(np.float32)
    return pd.DataFrame(data)


def make_columns():
    linear, deep = [], []
    for name, size in SPARSE.items():
        column = tf.feature_column.categorical_column_with_identity(name, size)
        deep.append(tf.feature_column.embedding_column(column, 4))
        linear.append(column)
    for name in DENSE:
        deep.append(tf.feature_column.numeric_column(name))
        linear.append(tf.feature_column.numeric_column(name))
    return linear, deep


def make_estimator(name, config):
    linear, deep = make_columns()
    if name == "PNNEstimator":
        return models.PNNEstimator(deep, dnn_hidden_units=(16, 8), config=config)
    if name == "AFMEstimator":
        return models.AFMEstimator(linear, deep, config=config)
    options = {}
    if name == "AutoIntEstimator":
        # with the defaults, rounding differences grow from 1e-7 to 4e-2 in 20 steps
        options = {"att_layer_num": 1, "dnn_optimizer": tf.compat.v1.train.AdagradOptimizer(1e-3)}
    kind = getattr(models, name)
    return kind(linear, deep, dnn_hidden_units=(16, 8), config=config, **options)


def main():
    args = read_arguments(names={"nargs": "+"})
    data, features = read_data(), [*SPARSE, *DENSE]
    shapes = {name: FixedLenFeature([1], tf.int64) for name in SPARSE}
    shapes.update({name: FixedLenFeature([1], tf.float32) for name in DENSE})
    serving = tf.estimator.export.build_parsing_serving_input_receiver_fn(shapes)
    for name in args.names:
        model_dir = os.path.join(args.model_dir, name)
        estimator = make_estimator(name, tf.estimator.RunConfig(model_dir, tf_random_seed=1024))
        train = input_fn_pandas(data, features, "click", args.batch_size, num_epochs=None)
        estimator.train(train, max_steps=args.steps)
        test = input_fn_pandas(data, features, "click", args.batch_size, shuffle=False)
        print(name, "METRICS", estimator.evaluate(test))
        inputs = input_fn_pandas(data, features, None, args.batch_size, shuffle=False)
        print(name, "PREDICTED", len(list(estimator.predict(inputs, "pred"))))
        print(name, "EXPORTED", estimator.export_saved_model(f"{model_dir}/export", serving))


if __name__ == "__main__":
    main()
