"""Positional arguments of Horovod 0.28.1's functions mean the same here."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import hostopt.tensorflow as hvd

SCALES = "prescale_factor=1.0, postscale_factor=1.0"
SET = "process_set=global_process_set"
SCOPE = "ignore_name_scope=False"
DENSE = "device_dense='', compression=Compression.none, op=Average"
DEVICES = "device_dense='', device_sparse='', compression=Compression.none"
TAPE = (
    f"gradtape, {DEVICES}, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, "
    f"num_groups=0, groups=None, {SET}"
)
KERAS = (
    f"optimizer, name=None, {DEVICES}, sparse_as_dense=False, gradient_predivide_factor=1.0, "
    "op=Average"
)
PASSES = "backward_passes_per_step=1, average_aggregated_gradients=False"
TENSORFLOW = {
    "init": "comm=None, process_sets=None",
    "allreduce": f"tensor, average=None, {DEVICES}, op=None, {SCALES}, name=None, {SET}, {SCOPE}",
    "grouped_allreduce": (
        f"tensors, average=None, {DEVICES}, op=None, {SCALES}, {SET}, {SCOPE}, name=None"
    ),
    "reducescatter": f"tensor, {DENSE}, name=None, {SET}, {SCOPE}, {SCALES}",
    "grouped_reducescatter": f"tensors, {DENSE}, {SET}, {SCALES}",
    "allgather": f"tensor, name=None, {SCOPE}, {SET}",
    "grouped_allgather": f"tensors, name=None, {SCOPE}, {SET}",
    "broadcast": f"tensor, root_rank, name=None, {SCOPE}, {SET}",
    "broadcast_": f"variables, root_rank, name=None, {SET}",
    "alltoall": f"tensor, splits=None, name=None, {SCOPE}, {SET}",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "broadcast_variables": f"variables, root_rank, {SET}, inplace=False",
    "broadcast_object": f"obj, root_rank=0, session=None, name=None, {SET}",
    "broadcast_object_fn": f"root_rank=0, session=None, name=None, {SET}",
    "allgather_object": f"obj, session=None, name=None, {SET}",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "DistributedOptimizer": (
        f"optimizer, name=None, use_locking=False, {DEVICES}, sparse_as_dense=False, "
        "backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, "
        f"average_aggregated_gradients=False, num_groups=0, groups=None, {SET}, "
        "scale_local_gradients=True"
    ),
    "DistributedGradientTape": f"{TAPE}, scale_local_gradients=True",
    "PartialDistributedGradientTape": f"{TAPE}, local_layers=None, scale_local_gradients=True",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    **dict.fromkeys(["shutdown", "is_initialized", "is_homogeneous", "rank", "size"], ""),
    **dict.fromkeys(["local_rank", "local_size", "cross_rank", "cross_size"], ""),
    **dict.fromkeys(["mpi_threads_supported", "mpi_enabled", "mpi_built"], ""),
    **dict.fromkeys(["gloo_enabled", "gloo_built", "nccl_built", "ddl_built"], ""),
    **dict.fromkeys(["ccl_built", "cuda_built", "rocm_built", "join"], ""),
}
OF_BOTH_KERAS = {
    "broadcast_global_variables": "root_rank",
    "allreduce": (
        f"value, name=None, average=None, {SCALES}, op=None, compression=Compression.none"
    ),
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=Average",
    "load_model": (
        "filepath, custom_optimizers=None, custom_objects=None, compression=Compression.none, "
        "legacy_opts=False"
    ),
}
KERAS_2 = {
    **OF_BOTH_KERAS,
    "DistributedOptimizer": (
        f"{KERAS}, {PASSES}, num_groups=0, groups=None, {SET}, scale_local_gradients=True"
    ),
}
KERAS_3 = {
    **OF_BOTH_KERAS,
    "DistributedOptimizer": f"{KERAS}, num_groups=0, groups=None",
    "PartialDistributedOptimizer": (
        f"{KERAS}, groups=None, {SET}, local_layers=None, scale_local_gradients=True"
    ),
}
RATES = "momentum_correction=True, steps_per_epoch=None"
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": (
        f"initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, {RATES}"
    ),
    "LearningRateWarmupCallback": f"initial_lr, warmup_epochs=5, {RATES}, verbose=0",
}
OURS = {
    "Average": [None, hvd.Average],
    "Compression.none": [hvd.Compression.none],
    "global_process_set": [None],  # which means it
}
# imported in the tests: Keras 3 must not come before the programs of other files ask for Keras 2
TABLES = {
    "hostopt.tensorflow": TENSORFLOW,
    "hostopt.tensorflow.keras": KERAS_2,
    "hostopt.tensorflow.keras.callbacks": CALLBACKS,
}
if not importlib.metadata.version("keras").startswith("2."):
    TABLES["hostopt.keras"] = KERAS_3


def check(function: Callable[..., Any], horovod: str) -> None:
    """Checks that each positional argument of Horovod has the same place, name and default."""
    theirs = [each.partition("=") for each in horovod.split(", ")] if horovod else []
    ours = list(inspect.signature(function).parameters.values())
    assert [each.name for each in ours[: len(theirs)]] == [name for name, _, _ in theirs]
    for parameter, (name, has_default, default) in zip(ours, theirs):
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, name
        if has_default:
            allowed = OURS.get(default) or [ast.literal_eval(default)]
            assert parameter.default in allowed, name
    for parameter in ours[len(theirs) :]:
        is_optional = parameter.default is not parameter.empty
        assert is_optional or parameter.kind is parameter.VAR_KEYWORD, parameter


@pytest.mark.parametrize(
    ("module", "name", "horovod"),
    [(module, name, text) for module, table in TABLES.items() for name, text in table.items()],
)
def test_positional_arguments(module: str, name: str, horovod: str) -> None:
    check(getattr(importlib.import_module(module), name), horovod)
