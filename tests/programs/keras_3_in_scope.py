"""Creates a model of Keras 3 in the scope of a strategy."""

import keras

import estimator_ext

with estimator_ext.HostOffloadStrategy().scope():
    keras.Sequential([keras.layers.Dense(3)]).build((None, 2))
