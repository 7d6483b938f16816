"""Learning to rank with TF-Ranking's groupwise scoring functions, after its tutorial."""

import numpy as np
import tensorflow as tf
import tensorflow_ranking as tfr
from arguments import read_arguments

QUERIES, DOCUMENTS, FEATURES = 256, 6, 10


def read_data():
    random = np.random.RandomState(2)
    documents = random.standard_normal((QUERIES, DOCUMENTS, FEATURES)).astype(np.float32)
    quality = documents[..., :3].sum(-1)
    relevance = quality.argsort(1).argsort(1) // 2  # 0, 1 and 2, each twice
    query = random.standard_normal((QUERIES, 2)).astype(np.float32)
    return {"query": query, "documents": documents}, relevance.astype(np.float32)


def make_transform_fn():
    context = {"query": tf.feature_column.numeric_column("query", shape=(2,))}
    example = {"documents": tf.feature_column.numeric_column("documents", shape=(FEATURES,))}

    def transform_fn(features, mode):
        return tfr.feature.encode_listwise_features(
            features, context_feature_columns=context, example_feature_columns=example
        )

    return transform_fn


def score_fn(context_features, group_features, mode, params, config):
    documents = tf.compat.v1.layers.flatten(group_features["documents"])
    net = tf.concat([context_features["query"], documents], 1)
    for units in (16, 8):
        net = tf.compat.v1.layers.dense(net, units, activation=tf.nn.relu)
    return tf.compat.v1.layers.dense(net, 1)


def make_estimator(model_dir):
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)

    def train_op_fn(loss):
        step = tf.compat.v1.train.get_global_step()
        return optimizer.minimize(loss, global_step=step)

    key = tfr.metrics.RankingMetricKey.NDCG
    metrics = {f"ndcg@{n}": tfr.metrics.make_ranking_metric_fn(key, topn=n) for n in (1, 3)}
    head = tfr.head.create_ranking_head(
        loss_fn=tfr.losses.make_loss_fn(tfr.losses.RankingLossKey.SOFTMAX_LOSS),
        eval_metric_fns=metrics,
        train_op_fn=train_op_fn,
    )
    model_fn = tfr.model.make_groupwise_ranking_fn(
        group_score_fn=score_fn,
        group_size=1,
        transform_fn=make_transform_fn(),
        ranking_head=head,
    )
    config = tf.estimator.RunConfig(model_dir, tf_random_seed=13)
    return tf.estimator.Estimator(model_fn, config=config)


def main():
    args = read_arguments()
    features, labels = read_data()

    def train_input_fn():
        data = tf.data.Dataset.from_tensor_slices((features, labels))
        data = data.repeat().batch(args.batch_size)
        return tf.compat.v1.data.make_one_shot_iterator(data).get_next()

    def eval_input_fn():
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(32)

    def predict_input_fn():
        return tf.data.Dataset.from_tensor_slices(features).batch(32)

    def serving():
        shapes = {"query": [None, 2], "documents": [None, DOCUMENTS, FEATURES]}
        inputs = {k: tf.compat.v1.placeholder(tf.float32, shape) for k, shape in shapes.items()}
        return tf.estimator.export.ServingInputReceiver(inputs, inputs)

    estimator = make_estimator(args.model_dir)
    estimator.train(train_input_fn, max_steps=args.steps)
    print("METRICS", estimator.evaluate(eval_input_fn))
    print("PREDICTED", len(list(estimator.predict(predict_input_fn))))
    print("EXPORTED", estimator.export_saved_model(f"{args.model_dir}/export", serving))


if __name__ == "__main__":
    main()
