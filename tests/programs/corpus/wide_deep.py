"""Wide & deep on census-like data, after the tutorial of TensorFlow 1."""

import numpy as np
import tensorflow as tf
from arguments import read_arguments

ROWS = 512
JOBS = ["cook", "clerk", "smith", "baker"]
TOWNS = ["Bath", "York", "Ely", "Wells", "Ripon"]


def read_data():
    random = np.random.RandomState(3)
    features = {
        "age": random.uniform(18, 80, ROWS).astype(np.float32),
        "hours": random.uniform(5, 60, ROWS).astype(np.float32),
        "job": random.choice(JOBS, ROWS),
        "town": random.choice(TOWNS, ROWS),
    }
    rich = features["age"] + features["hours"] + 20 * (features["job"] == "smith") > 90
    return features, rich.astype(np.int64)


def make_columns():
    column = tf.feature_column
    age, hours = column.numeric_column("age"), column.numeric_column("hours")
    ages = column.bucketized_column(age, [25, 35, 45, 55, 65])
    job = column.categorical_column_with_vocabulary_list("job", JOBS)
    town = column.categorical_column_with_hash_bucket("town", 20)
    wide = [
        job,
        town,
        ages,
        column.crossed_column(["job", "town"], 100),
        column.crossed_column([ages, "job"], 100),
    ]
    deep = [
        column.numeric_column("age", normalizer_fn=lambda x: (x - 49) / 18),
        column.numeric_column("hours", normalizer_fn=lambda x: (x - 32) / 16),
        column.indicator_column(job),
        column.embedding_column(town, 4),
    ]
    return wide, deep, [age, hours, job, town]


def main():
    args = read_arguments()
    features, labels = read_data()
    wide, deep, raw = make_columns()
    estimator = tf.estimator.DNNLinearCombinedClassifier(
        model_dir=args.model_dir,
        linear_feature_columns=wide,
        linear_optimizer="Ftrl",
        dnn_feature_columns=deep,
        dnn_optimizer="Adagrad",
        dnn_hidden_units=[32, 16],
    )

    def train_input_fn():
        data = tf.data.Dataset.from_tensor_slices((features, labels))
        return data.repeat().batch(args.batch_size)

    def eval_input_fn():
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(64)

    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(train_input_fn, max_steps=args.steps),
        tf.estimator.EvalSpec(eval_input_fn, steps=None, throttle_secs=0, start_delay_secs=0),
    )
    print("METRICS", estimator.evaluate(eval_input_fn))
    print("PREDICTED", len(list(estimator.predict(eval_input_fn, "probabilities"))))
    serving = tf.estimator.export.build_parsing_serving_input_receiver_fn(
        tf.feature_column.make_parse_example_spec(raw)
    )
    print("EXPORTED", estimator.export_saved_model(f"{args.model_dir}/export", serving))


if __name__ == "__main__":
    main()
