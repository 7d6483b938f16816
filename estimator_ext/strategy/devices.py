"""The accelerator of a rank: its GPU among those of its host, or the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from hostopt.collectives.communicator import all_gather_json
from hostopt.options import shown
from hostopt.tensorflow.background import HOST_DEVICE

_GPU = "/device:GPU:0"  # the first one that this process sees
_MAX_DEVICES = 1023  # a session creates all CPU devices up to the one that is named
# with these a launcher or a user gives each process its GPUs
_CHOOSING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

_log = tf.get_logger()


def is_gpu(device: str) -> bool:
    """Returns True for a GPU, which has memory of its own."""
    return bool(tf.DeviceSpec.from_string(device).device_type == "GPU")


@dataclass(frozen=True)
class Accelerator:
    """The device of forward and backward."""

    device: str
    gpus: tuple[int, ...] = ()  # that this process uses; empty leaves all as they are
    given: str = ""  # the environment variables that show this process some of the GPUs

    def configure(self, config: tf.compat.v1.ConfigProto) -> None:
        """Adds the device to the configuration of a session, which may say otherwise."""
        spec, options = tf.DeviceSpec.from_string(self.device), config.gpu_options
        if spec.device_type == "CPU":
            config.device_count["CPU"] = max(
                config.device_count["CPU"], (spec.device_index or 0) + 1
            )
        if self.gpus and not options.visible_device_list:
            options.visible_device_list = ",".join(map(str, self.gpus))

    def check_alone(
        self,
        cluster: hostopt.Cluster,
        communicator: hostopt.Communicator,
        config: tf.compat.v1.ConfigProto,
    ) -> None:
        """Refuses a GPU for several ranks, unless each takes only the memory that it needs.

        Collective: all ranks must call it. Ranks to which a variable shows one GPU may have
        different ones: some launchers hide the others, and each rank counts from 0.
        """
        options = config.gpu_options
        grows = options.allow_growth or options.per_process_gpu_memory_fraction
        takes_all = is_gpu(self.device) and not grows and os.environ.get(_GROWTH) != "true"
        number = options.visible_device_list
        own = [self.given, number] if takes_all and (self.given or number) else None
        each = all_gather_json(communicator, own)
        ranks = [rank for rank in cluster.local_ranks if each[rank] == own]
        if own is None or len(ranks) == 1:
            return
        names = f"ranks {', '.join(map(str, ranks))} of this host"
        if self.gpus:
            raise hostopt.ConfigError(
                f"{names} find the same GPU, number {number}, and each would take all of its "
                f"memory. Start one rank for each GPU, or set {_GROWTH}=true"
            )
        _log.warning(
            f"{names} have {self.given}. If that is the same GPU, set {_GROWTH}=true, as each "
            "takes all of its memory"
        )


def find_accelerator(cluster: hostopt.Cluster, wanted: str | None) -> Accelerator:
    """Returns the accelerator of this process, and hides the GPUs of other ranks from it.

    Rank i of a host takes GPU i. What the user has chosen stays: a device by name, devices that
    are visible to TensorFlow, or one GPU by an environment variable.
    """
    if wanted is not None:
        _check_device(wanted)
        return Accelerator(wanted)
    if cluster.rank is None:  # must not even look for a GPU
        return Accelerator(HOST_DEVICE)
    gpus = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return Accelerator(HOST_DEVICE)
    chosen = ", ".join(f"{name}={os.environ[name]}" for name in _CHOOSING if os.environ.get(name))
    if len(gpus) == 1 and chosen:
        return Accelerator(_GPU, (), chosen)
    ranks = cluster.local_ranks
    if len(ranks) == 1 and visible == gpus:
        return Accelerator(_GPU)
    if visible == gpus:
        gpu = ranks.index(cluster.rank) % len(gpus)
        visible = [gpus[gpu]]
        if len(gpus) > 1:
            _hide_others(gpus, gpu)
    # sessions do not follow `tf.config` by themselves
    return Accelerator(_GPU, tuple(map(gpus.index, visible)), chosen)


def _hide_others(gpus: Sequence[Any], gpu: int) -> None:
    try:
        tf.config.set_visible_devices(gpus[gpu], "GPU")
    except RuntimeError as error:
        raise hostopt.ConfigError(
            f"TensorFlow has opened all {len(gpus)} GPUs, wanted only GPU {gpu} for this rank. "
            "Create the strategy before anything is computed, or give each rank its GPU with "
            "CUDA_VISIBLE_DEVICES"
        ) from error


def _check_device(name: Any) -> None:
    try:
        device = tf.DeviceSpec.from_string(name)
    except (TypeError, ValueError, AttributeError):
        device = None
    if not (device and device.device_type and 0 <= (device.device_index or 0) <= _MAX_DEVICES):
        raise hostopt.ConfigError(
            f"accelerator is {shown(name)}, wanted the name of a device with a number up to "
            f"{_MAX_DEVICES}. Give one such as '/device:GPU:0', or leave it out"
        )
