"""Looks into a SavedModel."""

from __future__ import annotations

from pathlib import Path

from tensorflow.core.protobuf import saved_model_pb2


def operation_types(export: Path) -> set[str]:
    """Returns the types of all operations of a SavedModel, including its functions."""
    model = saved_model_pb2.SavedModel.FromString((export / "saved_model.pb").read_bytes())
    graph = model.meta_graphs[0].graph_def
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return {node.op for node in nodes}
