"""The functions that operations of a graph call, directly or through other functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tensorflow as tf

Nodes = Collection[Any]  # of a graph or a function


def library_of(graph: tf.Graph) -> dict[str, Nodes]:
    """Returns the nodes of each function of a graph, by its name."""
    functions = graph.as_graph_def().library.function
    return {function.signature.name: function.node_def for function in functions}


def with_called(nodes: Nodes, library: Mapping[str, Nodes]) -> Iterator[Nodes]:
    """Yields the nodes, then the nodes of each called function; all ranks have the same order."""
    found: set[str] = set()
    todo = [nodes]
    while todo:
        nodes = todo.pop()
        yield nodes
        for node in nodes:
            for name in (node.op, *_functions_of(node)):  # TensorFlow 1 calls by the type
                if name in library and name not in found:
                    found.add(name)
                    todo.append(library[name])


def _functions_of(node: Any) -> Iterator[str]:
    for _, attribute in sorted(node.attr.items()):
        yield from (each.name for each in [attribute.func, *attribute.list.func] if each.name)
