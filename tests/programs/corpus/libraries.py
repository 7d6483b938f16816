"""Models with the layers, losses and optimizers of libraries, after their documentation."""

import numpy as np
import tensorflow as tf
from ways import FEATURES, ROWS, X, Y, main

v1, estimators = tf.compat.v1, tf.estimator
KERNEL = v1.glorot_uniform_initializer(seed=5)
CLASSES = (Y[:, 0] > 0).astype(np.int32)


def dense(x, units, activation=None):
    return v1.layers.dense(x, units, activation, kernel_initializer=KERNEL)


def train(way, make_train_op, x=X, y=Y):
    """Trains a model; `make_train_op` returns the loss and the operation of a step."""

    def model_fn(features, labels, mode):
        loss, train_op = make_train_op(features["x"], labels, v1.train.get_global_step())
        return estimators.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = estimators.RunConfig(way.model_dir)
    estimator = estimators.Estimator(model_fn, config=config)
    estimator.train(data_of(way, x, y), max_steps=way.steps)


def data_of(way, x=X, y=Y):
    def data():
        rows = tf.data.Dataset.from_tensor_slices(({"x": x}, y))
        return rows.repeat().batch(way.batch_size)

    return data


def gan(way):
    import tensorflow_gan as tfgan

    estimator = tfgan.estimator.GANEstimator(
        way.model_dir,
        generator_fn=lambda noise: dense(dense(noise, 8, tf.nn.tanh), 2),
        discriminator_fn=lambda data, condition: dense(dense(data, 8, tf.nn.tanh), 1),
        generator_loss_fn=tfgan.losses.wasserstein_generator_loss,
        discriminator_loss_fn=tfgan.losses.wasserstein_discriminator_loss,
        generator_optimizer=v1.train.AdamOptimizer(0.01, 0.5),
        discriminator_optimizer=v1.train.AdamOptimizer(0.01, 0.5),
    )

    def data():
        rows = tf.data.Dataset.from_tensor_slices((X[:, :4], X[:, 4:]))
        return rows.repeat().batch(way.batch_size)

    estimator.train(data, max_steps=way.steps)


def adversarial(way):
    import neural_structured_learning as nsl

    base = estimators.DNNClassifier(
        [8],
        [tf.feature_column.numeric_column("x", [FEATURES])],
        config=estimators.RunConfig(way.model_dir),
    )
    config = nsl.configs.make_adv_reg_config(multiplier=0.2, adv_step_size=0.1)
    estimator = nsl.estimator.add_adversarial_regularization(
        base, lambda: v1.train.AdagradOptimizer(0.05), config
    )
    estimator.train(data_of(way, y=CLASSES), max_steps=way.steps)


def probability(way):
    import tensorflow_probability as tfp

    def make(x, y, step):
        loc, scale = tf.split(dense(dense(x, 8, tf.nn.tanh), 2), 2, -1)
        normal = tfp.distributions.Normal(loc, 1e-3 + tf.nn.softplus(scale))
        loss = -tf.reduce_mean(normal.log_prob(y))
        return loss, v1.train.AdamOptimizer(0.02).minimize(loss, step)

    train(way, make)


def kfac(way):
    import kfac

    def make(x, y, step):
        layers = kfac.LayerCollection()
        layer = v1.layers.Dense(3, kernel_initializer=KERNEL)
        logits = layer(x)
        layers.register_fully_connected((layer.kernel, layer.bias), x, logits)
        layers.register_softmax_cross_entropy_loss(logits, targets=y)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        optimizer = kfac.PeriodicInvCovUpdateKfacOpt(
            learning_rate=0.05,
            damping=0.1,
            layer_collection=layers,
            invert_every=5,
            estimation_mode="empirical",  # others draw labels at random
        )
        loss = tf.reduce_mean(losses)
        return loss, optimizer.minimize(loss, step)

    train(way, make, y=CLASSES)


def privacy(way, is_unrolled=False):
    from tensorflow_privacy.privacy.optimizers import dp_optimizer

    def make(x, y, step):
        losses = tf.reduce_sum((dense(dense(x, 8, tf.nn.tanh), 1) - y) ** 2, 1)
        optimizer = dp_optimizer.DPGradientDescentGaussianOptimizer(
            l2_norm_clip=1.0,
            noise_multiplier=0.0,  # which any two runs draw differently
            num_microbatches=way.batch_size,
            unroll_microbatches=is_unrolled,
            learning_rate=0.1,
        )
        return tf.reduce_mean(losses), optimizer.minimize(losses, step)

    train(way, make)


def privacy_unrolled(way):
    privacy(way, is_unrolled=True)


def constrained(way):
    import tensorflow_constrained_optimization as tfco

    def make(x, y, step):
        context = tfco.rate_context(dense(x, 1)[:, 0], labels=y)
        problem = tfco.RateMinimizationProblem(
            tfco.error_rate(context), [tfco.recall(context) >= 0.9]
        )
        optimizer = tfco.LagrangianOptimizerV1(v1.train.AdagradOptimizer(0.1))
        train_op = optimizer.minimize(problem, global_step=step)
        return problem.objective(), train_op

    train(way, make, y=CLASSES)


def medical(way):
    from dltk.networks.segmentation.unet import residual_unet_3d

    def make(x, y, step):
        net = residual_unet_3d(
            x,
            2,
            filters=(2, 4),
            strides=((1, 1, 1), (2, 2, 2)),
            mode=estimators.ModeKeys.TRAIN,
        )
        loss = v1.losses.sparse_softmax_cross_entropy(y, net["logits"])
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            return loss, v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, step)

    x = np.random.RandomState(8).standard_normal((ROWS, 4, 4, 4, 1)).astype(np.float32)
    train(way, make, x, (x[..., 0] > 0).astype(np.int32))


if __name__ == "__main__":
    main(globals())
