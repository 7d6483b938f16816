"""Layers of imports, and which modules alone import what."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import ROOT
from modules import FILES, tree_of

# From the bottom up. A module imports from layers below its own, or from its own package.
LAYERS = [
    ["hostopt.errors", "hostopt.versions", "hostopt.shapes"],
    ["hostopt.process", "hostopt.options"],
    ["hostopt.cluster"],
    ["hostopt.telemetry"],
    ["hostopt.transport"],
    ["hostopt.launch", "hostopt.collectives"],
    ["hostopt.adapters", "hostopt.lock_file"],
    ["hostopt.by_name", "hostopt.gradients"],
    ["hostopt.measure"],
    ["hostopt.connect"],
    ["hostopt"],
    ["hostopt.process_ring", "hostopt.doctor", "hostopt.ray"],
    ["hostopt.tensorflow"],
    ["hostopt.keras"],
    ["hostopt.commands"],
    ["hostopt.__main__"],
    ["estimator_ext._tf_private", "estimator_ext.errors"],
    ["estimator_ext._tf_estimator"],
    ["estimator_ext.options", "estimator_ext.spec"],
    ["estimator_ext.checkpoints", "estimator_ext.variables"],
    ["estimator_ext.graphs"],
    ["estimator_ext.pipelines", "estimator_ext.evaluation"],
    ["estimator_ext.losses"],
    ["estimator_ext.reduction", "estimator_ext.input"],
    ["estimator_ext.strategy", "estimator_ext.session"],
    ["estimator_ext.data_workers", "estimator_ext.local_steps"],
    ["estimator_ext.estimator"],
    ["estimator_ext.tpu"],
    ["estimator_ext.compat"],
    ["estimator_ext"],
]


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules that the code imports anywhere, also inside functions and for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module
        else:
            yield from imports(node)


@functools.cache
def imports_of(name: str) -> frozenset[str]:
    return frozenset(imports(tree_of(name)))


def starts_with(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer_of(name: str) -> tuple[int, str]:
    """Index of a module's layer, and the entry of `LAYERS` that it belongs to."""
    entry = name
    while True:
        for index, layer in enumerate(LAYERS):
            if entry in layer and (entry == name or entry != "hostopt"):
                return index, entry
        entry, _, _ = entry.rpartition(".")
        assert entry, f"{name} has no layer: add it to LAYERS"


def test_imports_are_found_at_any_depth() -> None:
    code = """
import json, os.path
from hostopt import Options
from hostopt.cluster import cluster
from hostopt.errors import ConfigError
if TYPE_CHECKING:
    import hostopt.__main__
def function():
    try:
        import grpc
    except ImportError:
        from estimator_ext import spec as other
"""
    assert set(imports(ast.parse(code))) == {
        "json",
        "os.path",
        "hostopt.cluster.cluster",
        "hostopt",
        "hostopt.errors",
        "hostopt.__main__",
        "grpc",
        "estimator_ext.spec",
    }


def test_imports_go_down_without_cycles() -> None:
    graph = {name: sorted(imports_of(name) & FILES.keys() - {name}) for name in FILES}
    upwards = []
    for name, imported in graph.items():
        layer, entry = layer_of(name)
        for other in imported:
            other_layer, other_entry = layer_of(other)
            if other_layer >= layer and other_entry != entry:
                upwards.append(f"{name} -> {other}")
    assert upwards == []
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_one_module_of_hostopt_imports_tensorflow() -> None:
    users = {
        name
        for name in FILES
        if starts_with(name, "hostopt")
        and any(starts_with(result, "tensorflow") for result in imports_of(name))
    }
    assert all(starts_with(name, "hostopt.tensorflow") for name in users)


def test_data_from_peers_are_never_unpickled_or_executed() -> None:
    makers = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    for name in (name for name in FILES if starts_with(name, "hostopt")):
        assert not {result.partition(".")[0] for result in imports_of(name)} & set(makers), name
    for name in (name for name in FILES if starts_with(name, "hostopt.transport")):
        nodes = ast.walk(tree_of(name))
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        assert not called & {"eval", "exec", "compile", "__import__", "np.load"}, name


def test_only_the_grpc_transport_imports_grpc() -> None:
    users = {name for name in FILES if any(starts_with(f, "grpc") for f in imports_of(name))}
    assert users == {"hostopt.transport.grpc.runtime"}


def test_one_module_imports_mpi() -> None:
    users = {name for name in FILES if any(starts_with(f, "mpi4py") for f in imports_of(name))}
    assert users == {"hostopt.collectives.mpi.runtime"}


def estimator_names(tree: ast.AST) -> Iterator[str]:
    """Returns the uses of tensorflow_estimator or tf.estimator in code, not in text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "estimator":
            if ast.unparse(node).startswith(("tf.", "tensorflow.")):
                yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id == "tensorflow_estimator":
            yield node.id
        elif isinstance(node, ast.Constant) and node.value == "tensorflow_estimator":
            yield node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                parts = f"{module}.{alias.name}".split(".") if module else alias.name.split(".")
                in_tensorflow = parts[0] == "tensorflow" and "estimator" in parts
                if parts[0] == "tensorflow_estimator" or in_tensorflow:
                    yield ".".join(parts)


@pytest.mark.parametrize(
    "code",
    [
        "tf.estimator.Estimator",
        "x = tf.compat.v1.estimator.RunConfig()",
        "import tensorflow_estimator as e",
        "importlib.import_module('tensorflow_estimator')",
        "from tensorflow_estimator.python.estimator import util",
        "from tensorflow import estimator",
        "from tensorflow.compat.v1.estimator import Estimator",
    ],
)
def test_the_estimator_is_found_in_code(code: str) -> None:
    assert list(estimator_names(ast.parse(f"'''tf.estimator'''\n{code}")))


def test_one_module_imports_the_estimator() -> None:
    users = {name for name in FILES if list(estimator_names(tree_of(name)))}
    assert users == {"estimator_ext._tf_estimator._loading"}


PRIVATE = {  # of graphs, operations, tensors, datasets, strategies, files and savers
    "_add_control_inputs",
    "_control_outputs",
    "_current_control_dependencies",
    "_get_control_flow_context",
    "_get_saver",
    "_initializer_op",
    "_is_ref_dtype",
    "_prewrite_check",
    "_save_path",
    "_scale_loss_for_estimator_enabled",
    "_stop_requested",
    "_update_input",
    "_variant_tensor",
    "_writable_file",
}


def test_one_module_uses_private_names_of_tensorflow() -> None:
    importers = {
        name
        for name in FILES
        if any(starts_with(imported, "tensorflow.python") for imported in imports_of(name))
    }
    assert importers == {"estimator_ext._tf_private", "hostopt.tensorflow._tf_private"}
    users: dict[str, set[str]] = {}
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
                users.setdefault(node.attr, set()).add(name)
    assert set(users) == PRIVATE
    assert set().union(*users.values()) == {"estimator_ext._tf_private"}


def test_importing_hostopt_loads_neither_tensorflow_nor_grpc() -> None:
    code = "import sys, hostopt, hostopt.__main__; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    loaded = run.stdout.split()
    assert "hostopt.collectives.communicator" in loaded
    heavy = ("tensorflow", "tensorflow_estimator", "grpc", "mpi4py", "estimator_ext")
    assert not [name for name in loaded if name.partition(".")[0] in heavy]
