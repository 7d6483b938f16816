"""Devices of the operations of a step without soft placement, read from its step stats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

OPTIMIZERS = ["sgd", "momentum", "adam"]

HOST, ACCELERATOR = "CPU:0", "CPU:1"
FORWARD = {"MatMul", "_FusedMatMul", "SparseSoftmaxCrossEntropyWithLogits", "BiasAdd"}
BACKWARD = {"ReluGrad", "BiasAddGrad"}


class Step:
    """One traced step.

    Args:
      path: what the Trace hook of programs/train.py wrote.
    """

    def __init__(self, path: Path) -> None:
        self._record = record = json.loads(path.read_text())
        self.types: dict[str, str] = record["types"]
        self.variables: dict[str, str] = record["variables"]
        self._nodes = {device[-5:]: names for device, names in record["nodes"].items()}

    def ran(self, device: str) -> set[tuple[str, str]]:
        """Returns (type, name) of the graph's operations that ran on a device."""
        names = {name.split(":")[0] for name in self._nodes.get(device, [])}
        return {(self.types[name], name) for name in names if name in self.types}

    def moved_on_host(self, kinds_without: set[str]) -> int:
        """Returns the bytes that operations on the host read and write, from their shapes."""
        moved = 0
        for kind, name in self.ran(HOST):
            if kind not in kinds_without:
                inputs, outputs = self._record["inputs"][name], self._record["outputs"][name]
                sizes = {each: self._record["nbytes"][each] for each in (*inputs, *outputs)}
                handles = [each for each in inputs if self._is_handle(each)]
                moved += sum(sizes.values()) + sum(sizes[each] for each in handles)
        return moved

    def crossed(self, source: str, target: str) -> int:
        """Returns the bytes of the tensors that one device sends to another, each once."""
        senders = {name for _, name in self.ran(source)}
        tensors = {each for _, name in self.ran(target) for each in self._record["inputs"][name]}
        sent = {each for each in map(self._origin, tensors) if each.split(":")[0] in senders}
        return sum(self._record["nbytes"][each] for each in sent if not self._is_handle(each))

    def _origin(self, tensor: str) -> str:
        """Returns the tensor that one is equal to, if TensorFlow has left out an operation."""
        name = tensor.split(":", maxsplit=1)[0]
        ran = {each for device in (HOST, ACCELERATOR) for _, each in self.ran(device)}
        if self.types[name] != "Identity" or name in ran:
            return tensor
        return self._origin(self._record["inputs"][name][0])

    def _is_handle(self, tensor: str) -> bool:
        return self.types[tensor.split(":", maxsplit=1)[0]] == "VarHandleOp"

    def devices_of(self, kind: str) -> set[str]:
        """Returns the devices on which operations of a type ran."""
        return {d for d in (HOST, ACCELERATOR) for type_, _ in self.ran(d) if type_ == kind}


def traced(ranks: Ranks, tmp_path: Path, size: int = 2, **settings: object) -> Step:
    options = {"model_dir": str(tmp_path / "m"), "dump_dir": str(tmp_path), "trace": True}
    options |= {"optimizers": ["adam"], "steps": 5, "dtype": "float32", **settings}
    ranks.run("train.py", size, arguments=[json.dumps(options)])
    return Step(tmp_path / "trace-0.json")


def test_accelerator_computes_and_host_updates(tmp_path: Path, ranks: Ranks) -> None:
    step = traced(ranks, tmp_path)
    on_accelerator = {kind for kind, _ in step.ran(ACCELERATOR)}
    on_host = {kind for kind, _ in step.ran(HOST)}
    assert on_accelerator & FORWARD
    assert on_accelerator >= BACKWARD
    assert not on_host & (FORWARD | BACKWARD)
    assert step.devices_of("DatasetToSingleElement") == {HOST}  # the reduction
    assert step.devices_of("ResourceApplyAdam") == {HOST}
    assert {device[-5:] for device in step.variables.values()} == {HOST}
    gradients = [name for kind, name in step.ran(ACCELERATOR) if name.startswith("gradients")]
    assert gradients
    # an optimizer with slots adds no variable to the accelerator
    assert any(name.endswith("/Adam_1") for name in step.variables)
    assert not any("VarHandleOp" in kind for kind, _ in step.ran(ACCELERATOR))


def test_variables_on_the_accelerator_are_still_reduced_on_the_host(
    tmp_path: Path, ranks: Ranks
) -> None:
    step = traced(ranks, tmp_path, variables_on_host=False)
    assert step.devices_of("DatasetToSingleElement") == {HOST}
    assert step.devices_of("ResourceApplyAdam") == {ACCELERATOR}
    kernels = {n: d for n, d in step.variables.items() if "kernel" in n}
    assert {device[-5:] for device in kernels.values()} == {ACCELERATOR}


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_in_python_updates_on_the_host(
    tmp_path: Path, ranks: Ranks, size: int
) -> None:
    step = traced(ranks, tmp_path, size, optimizers=["adam by hand"], spec="minimize")
    assert step.devices_of("Sqrt") == {HOST}  # of a slot
    assert step.devices_of("ReluGrad") == {ACCELERATOR}


def test_sums_of_gradients_are_clipped_on_the_host(tmp_path: Path, ranks: Ranks) -> None:
    step = traced(ranks, tmp_path, clip=1.0, spec="minimize")
    assert step.devices_of("Sqrt") == {HOST}  # of the norms
    assert ("Const", "Adam/learning_rate") in step.ran(HOST)


# Pass on a tensor without reading it.
PASSING = {"ReadVariableOp", "Identity", "VarHandleOp"}
PARAMETERS = 5 * 4096 + 4096 + 2 * 4096 + 2


@pytest.mark.parametrize("own_memory", [False, True])
def test_one_rank_moves_little_through_host_memory(
    tmp_path: Path, ranks: Ranks, own_memory: bool
) -> None:
    step = traced(ranks, tmp_path, size=1, hidden=4096, own_memory=own_memory)
    for kind in ("IsFinite", "All", "Pack"):  # of the check, before the copy
        assert step.devices_of(kind) == {ACCELERATOR}
    assert step.devices_of("ResourceApplyAdam") == {HOST}
    copies = {name for kind, name in step.ran(ACCELERATOR) if kind == "AssignVariableOp"}
    assert len(copies) == 4 * own_memory
    few = 2048  # the batch, the loss and the learning rate
    # Adam reads the gradient, and reads and writes the variable and two slots
    assert 0 <= step.moved_on_host(PASSING) - 28 * PARAMETERS < few
    assert 0 <= step.crossed(HOST, ACCELERATOR) - 4 * PARAMETERS < few
    assert 0 <= step.crossed(ACCELERATOR, HOST) - 4 * PARAMETERS < few


def test_a_micro_batch_is_added_once(tmp_path: Path, ranks: Ranks) -> None:
    step = traced(ranks, tmp_path, size=1, hidden=4096, accumulate_steps=2)
    # besides Adam: the sum and its division read two and one, write one each; a check reads one
    # and writes a byte, which it reads
    assert 0 <= step.moved_on_host(PASSING) - (28 + 12 + 8 + 6) * PARAMETERS < 2048


def test_copies_change_no_bit(tmp_path: Path, ranks: Ranks) -> None:
    finals = []
    for own_memory in (False, True):
        dump = tmp_path / str(own_memory)
        options = {"model_dir": str(dump), "dump_dir": str(dump), "own_memory": own_memory}
        options |= {"optimizers": OPTIMIZERS, "steps": 9, "dtype": "float32"}
        dump.mkdir()
        ranks.run("train.py", 2, arguments=[json.dumps(options)])
        finals.append([np.load(dump / f"{name}-1.npz") for name in OPTIMIZERS])
    for without, with_copies in zip(*finals):
        assert without.files == with_copies.files
        for name in without.files:
            assert np.array_equal(without[name], with_copies[name]), name
