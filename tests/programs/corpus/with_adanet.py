"""AdaNet's AutoEnsembleEstimator: it learns to ensemble a linear model and a neural network."""

import adanet
import numpy as np
import tensorflow as tf
from arguments import read_arguments

ROWS = 256


def read_data():
    random = np.random.RandomState(9)
    x = random.standard_normal((ROWS, 6)).astype(np.float32)
    return {"x": x}, (x[:, :3].sum(1) + np.abs(x[:, 3]) > 0.5).astype(np.int64)


def make_estimator(model_dir, iteration_steps):
    head = tf.estimator.BinaryClassHead()
    columns = [tf.feature_column.numeric_column("x", shape=[6])]

    def candidates(config):
        return {
            "linear": tf.estimator.LinearEstimator(
                head=head, feature_columns=columns, config=config, optimizer="SGD"
            ),
            "dnn": tf.estimator.DNNEstimator(
                head=head,
                feature_columns=columns,
                config=config,
                optimizer="Adagrad",
                hidden_units=[16],
            ),
        }

    return adanet.AutoEnsembleEstimator(
        head=head,
        candidate_pool=candidates,
        max_iteration_steps=iteration_steps,
        config=tf.estimator.RunConfig(model_dir, tf_random_seed=17),
    )


def main():
    args = read_arguments()
    features, labels = read_data()

    def train_input_fn():
        data = tf.data.Dataset.from_tensor_slices((features, labels))
        return data.repeat().batch(args.batch_size)

    def eval_input_fn():
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(32)

    def serving():
        x = tf.compat.v1.placeholder(tf.float32, [None, 6])
        return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    estimator = make_estimator(args.model_dir, iteration_steps=args.steps // 2)
    estimator.train(train_input_fn, max_steps=args.steps)
    print("METRICS", estimator.evaluate(eval_input_fn))
    print("PREDICTED", len(list(estimator.predict(eval_input_fn))))
    print("EXPORTED", estimator.export_saved_model(f"{args.model_dir}/export", serving))


if __name__ == "__main__":
    main()
