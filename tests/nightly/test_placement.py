"""Devices of the operations of a step without soft placement, read from its step stats."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import Ranks

HOST, ACCELERATOR = "CPU:0", "CPU:1"
FORWARD = {"MatMul", "_FusedMatMul", "SparseSoftmaxCrossEntropyWithLogits", "BiasAdd"}
BACKWARD = {"ReluGrad", "BiasAddGrad"}


class Step:
    """One traced step.

    Args:
      path: what the Trace hook of programs/train.py wrote.
    """

    def __init__(self, path: Path) -> None:
        record = json.loads(path.read_text())
        self.types: dict[str, str] = record["types"]
        self.variables: dict[str, str] = record["variables"]
        self._nodes = {device[-5:]: names for device, names in record["nodes"].items()}

    def ran(self, device: str) -> set[tuple[str, str]]:
        """Returns (type, name) of the graph's operations that ran on a device."""
        names = {name.split(":")[0] for name in self._nodes.get(device, [])}
        return {(self.types[name], name) for name in names if name in self.types}

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


def test_one_rank_moves_a_gradient_through_host_memory_once(tmp_path: Path, ranks: Ranks) -> None:
    step = traced(ranks, tmp_path, size=1)
    for kind in ("IsFinite", "All", "Pack"):  # of the check, before the copy
        assert step.devices_of(kind) == {ACCELERATOR}
    # nothing but the update reads what has been copied
    assert {kind for kind, _ in step.ran(HOST)} & {"Identity", "AddN", "IsFinite", "All"} == set()
    assert step.devices_of("ResourceApplyAdam") == {HOST}
