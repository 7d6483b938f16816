"""A dataset as a chain of transformations, and what may give its elements another order.

Most transformations keep the positions of elements, whatever their values are: after `map` and
`batch`, batch 3 has the same elements on all ranks if they were in the same order before. Others,
such as `filter` or `flat_map`, choose by values. So the order is known at the last of these, and
at the sources: the points of a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import (
    function_graphs,
    generator_state,
    inputs_of,
    loses_order,
    replace_input,
    scalars_of,
    set_attribute,
    variant_tensor,
    without_wrapper,
)
from estimator_ext.graphs.operation_kinds import arguments
from estimator_ext.graphs.walks import library_of, with_called

_KEEPING = {
    *("AssertCardinality", "AutoShard", "Batch", "Cache", "Concatenate", "CopyToDevice"),
    *("DenseToRagged", "DenseToSparseBatch", "Map", "MapAndBatch", "Options", "PaddedBatch"),
    *("ParallelBatch", "ParallelMap", "ParseExample", "Prefetch", "Rebatch", "Repeat"),
    *("Restructured", "Shard", "Shuffle", "ShuffleAndRepeat", "Skip", "Take", "Zip"),
}
# Depend on the machine, and change no element.
_OF_THIS_RANK = re.compile("parallel|prefetch|buffer_output")
_SHUFFLES = re.compile("Shuffle|ShuffleAndRepeat|Random")
# Write files, keep elements, or take those of a job.
_READ_ONCE = re.compile("Cache|DataService|LegacySnapshot|Save|Snapshot")
_READ_ONCE_EAGERLY = re.compile(f"{_READ_ONCE.pattern}|{_SHUFFLES.pattern}")
_READERS = re.compile(
    r"_?(ArrayRecord|FixedLengthRecord|RecordIO|SSTable|TextLine|TFRecord)Dataset"
)
_NAME = re.compile(r"_?(\w+?)Dataset(?:V\d+)?")


class Pipeline:
    """The transformations of a dataset."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.dataset = dataset
        self.all = _before([without_wrapper(dataset)])  # from the last to the sources
        kept = _before([without_wrapper(dataset)], _keeps_positions)
        # those after which elements keep their positions
        self.points = [each for each in kept if not _keeps_positions(each)]
        # what calls the generator of each `from_generator`
        self.generators = [state for state in map(generator_state, self.all) if state is not None]
        self._nodes = {id(each): list(_nodes_of(each)) for each in self.all}

    @property
    def in_graph(self) -> bool:
        """True in a graph, False eagerly."""
        return hasattr(variant_tensor(self.dataset), "graph")

    @property
    def reads_tables(self) -> bool:
        """True if a function reads a lookup table, which has to be initialized."""
        return any(node.op.startswith("Lookup") for node in self._nodes_of(self.all))

    def readable(self) -> list[tf.data.Dataset]:
        """Returns the points that may be read once more, and else the sources before them.

        A generator may have side effects. A shuffle has another order each time it is read, unless
        it is in a graph. A cache, and its like, must be read to the end.
        """
        found: list[tf.data.Dataset] = []
        for point in self.points:
            before = [each for each in _before([point]) if not inputs_of(each)]
            found += [point] if self._is_readable(point) else filter(self._is_readable, before)
        return found

    def _is_readable(self, dataset: tf.data.Dataset) -> bool:
        before = _before([dataset])
        if any(generator_state(each) is not None for each in before):
            return False
        unread = _READ_ONCE if self.in_graph else _READ_ONCE_EAGERLY
        return not any(unread.fullmatch(kind_of(each)) for each in before)

    def scalars(self) -> list[tuple[str, tf.Tensor]]:
        """Returns numbers that must be the same on all ranks, with their names."""
        return [
            (f"{kind_of(each)} {index}: {name}", value)
            for index, each in enumerate(self.all)
            for name, value in scalars_of(each).items()
            if not _OF_THIS_RANK.search(name) and kind_of(each) != "Prefetch"
        ]

    def make_deterministic(self) -> list[str]:
        """Makes parallel calls keep their order in a graph; returns the changed operations."""
        changed = []
        for each in self.all:
            op = variant_tensor(each).op
            if "deterministic" in op.node_def.attr and op.get_attr("deterministic") != b"true":
                is_changed = op.get_attr("deterministic") == b"false"
                changed += [op.name] if is_changed else []
                set_attribute(op, "deterministic", b"true")
        for each in _before(self.points):
            if any(map(_is_random, self._nodes_of([each]))):  # in the order of the calls
                op = variant_tensor(each).op
                for index, (name, _, _) in enumerate(arguments(op)):
                    if name == "num_parallel_calls":
                        changed.append(op.name)
                        with op.graph.as_default(), tf.control_dependencies(None):
                            replace_input(op, index, tf.constant(1, op.inputs[index].dtype))
        return changed

    def problems(self) -> Iterator[str]:
        """Yields what gives the ranks different orders, and what to do."""
        chosen = _before(self.points)
        for node in self._nodes_of(self.all):
            if node.attr["deterministic"].s == b"false":
                yield (
                    f"a function of a dataset has deterministic=False ({node.op}), which loses "
                    "the order. Leave it out there"
                )
        for node in filter(_is_random, self._nodes_of(chosen)):
            if node.attr["seed"].i == node.attr["seed2"].i == 0:
                yield without_seed(node.op)
        if self.in_graph:  # there it is made deterministic
            return
        for each in filter(_is_parallel, self.all):
            if loses_order(each):
                yield (
                    f"a dataset has deterministic=False ({kind_of(each)}), which loses the order. "
                    "Leave it out, or let each rank read its files with auto_shard='file'"
                )
        for node in filter(_is_random, self._nodes_of(filter(_is_parallel, chosen))):
            yield (
                f"parallel calls of a dataset draw random numbers ({node.op}), by which elements "
                "may be chosen later. Leave num_parallel_calls out there"
            )

    def _nodes_of(self, datasets: Iterable[tf.data.Dataset]) -> Iterator[Any]:
        """Yields the nodes of all functions that datasets call."""
        return (node for each in datasets for node in self._nodes[id(each)])


def reads_files(dataset: tf.data.Dataset) -> bool:
    """Returns True if TensorFlow's policy AUTO finds files that it can divide."""
    transformations = _before([without_wrapper(dataset)])
    names = [type(each).__name__ for each in transformations]
    names += [node.op for each in transformations for node in _nodes_of(each)]
    return any(map(_READERS.match, names))


def kind_of(dataset: tf.data.Dataset) -> str:
    """Returns the name of a transformation, such as "Map"."""
    match = _NAME.fullmatch(type(dataset).__name__)
    return match[1] if match else type(dataset).__name__


def _keeps_positions(dataset: tf.data.Dataset) -> bool:
    if kind_of(dataset) == "Unbatch":  # into parts of the same number
        specs = tf.nest.flatten([each.element_spec for each in inputs_of(dataset)])
        shapes = [getattr(each, "shape", tf.TensorShape(None)) for each in specs]
        return all(shape.rank and shape.as_list()[0] is not None for shape in shapes)
    return kind_of(dataset) in _KEEPING


def _before(
    datasets: Sequence[tf.data.Dataset],
    passes: Callable[[tf.data.Dataset], bool] = lambda _: True,
) -> list[tf.data.Dataset]:
    """Returns datasets and all that they transform, up to those at which `passes` is False."""
    found: dict[int, tf.data.Dataset] = {}
    todo = list(reversed(datasets))
    while todo:
        each = todo.pop()
        if id(each) not in found:
            found[id(each)] = each
            if passes(each):
                todo += reversed(inputs_of(each))
    return list(found.values())


def _nodes_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the nodes of the functions that a transformation calls, and of those they call."""
    for graph in function_graphs(dataset):
        own = [op.node_def for op in graph.get_operations()]
        for nodes in with_called(own, library_of(graph)):
            yield from nodes


def _is_random(node: Any) -> bool:
    return "seed" in node.attr and "seed2" in node.attr


def _is_parallel(dataset: tf.data.Dataset) -> bool:
    return kind_of(dataset).startswith("Parallel")


def without_seed(kind: str) -> str:
    """Describes random numbers that differ between ranks, by the kind of what draws them."""
    return (
        f"a dataset has no seed ({kind}). Make it after the HostOffloadStrategy, which sets one, "
        "or call tf.random.set_seed before"
    )
