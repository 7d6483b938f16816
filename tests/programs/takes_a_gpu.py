"""Prints which GPU this rank takes on machines with several numbers of GPUs, which are simulated.

Each argument is a number of GPUs, or that and a new value of CUDA_VISIBLE_DEVICES: 4 or 4:2,3.
"""

import contextlib
import json
import os
import sys
from unittest import mock

import tensorflow as tf

import estimator_ext
import hostopt


def take(count, visible):
    """Returns the name of the GPU that this rank takes, "all", "CPU", or the text of an error."""
    shown = range(count) if visible is None else [int(each) for each in visible.split(",") if each]
    gpus = [f"GPU {number}" for number in shown if number < count]

    def hide(kept, kind):
        gpus[:] = [kept]

    every = list(gpus)
    with mock.patch.multiple(
        tf.config,
        list_physical_devices=lambda kind: every,
        get_visible_devices=lambda kind: gpus,
        set_visible_devices=hide,
    ):
        strategy = estimator_ext.HostOffloadStrategy()
    config = strategy.update_config_proto(None)
    with contextlib.closing(strategy):
        try:
            strategy.own_device.check_alone(strategy.cluster, strategy.communicator, config)
        except hostopt.ConfigError as error:
            return str(error)
    if "GPU" not in strategy.accelerator:
        return "CPU"
    numbers = config.gpu_options.visible_device_list
    return every[int(numbers)] if numbers else every[0] if len(every) == 1 else "all"


taken = {}
for case in sys.argv[1:]:
    count, separator, visible = case.partition(":")
    if separator:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    taken[case] = take(int(count), os.environ.get("CUDA_VISIBLE_DEVICES"))
rank = hostopt.Cluster.from_tf_config().rank
sys.stdout.write(f"{json.dumps([rank, taken])}\n")  # at once, or mpirun may join it with others
sys.stdout.flush()
