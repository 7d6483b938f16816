"""The model_fn of Spleeter, on random spectrograms."""

import numpy as np
import tensorflow as tf
from arguments import read_arguments
from spleeter.model import model_fn

args = read_arguments()

PARAMS = {
    "mix_name": "mix",
    "instrument_list": ["vocals", "accompaniment"],
    "sample_rate": 44100,
    "frame_length": 126,
    "frame_step": 32,
    "T": 64,
    "F": 64,
    "n_channels": 1,
    "separation_exponent": 2,
    "mask_extension": "zeros",
    "learning_rate": 1e-3,
    "model": {"type": "unet.unet", "params": {"conv_n_filters": [2, 2, 4, 4, 8, 8]}},
}


def input_fn():
    parts = np.random.RandomState(4).gamma(1.0, size=(2, 64, 64, 64, 1)).astype(np.float32)
    labels = dict(zip(("vocals_spectrogram", "accompaniment_spectrogram"), parts))
    data = tf.data.Dataset.from_tensor_slices(({"mix_spectrogram": parts.sum(0)}, labels))
    return data.cache().repeat().batch(args.batch_size)


config = tf.estimator.RunConfig(args.model_dir, tf_random_seed=0)
estimator = tf.estimator.Estimator(model_fn, args.model_dir, config, PARAMS)
specs = tf.estimator.TrainSpec(input_fn, args.steps), tf.estimator.EvalSpec(input_fn, steps=2)
tf.estimator.train_and_evaluate(estimator, *specs)
