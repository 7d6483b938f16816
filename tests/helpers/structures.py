"""JSON documents with small changes, for tests that fuzz a reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Callable

from hypothesis import settings
from hypothesis import strategies as st

# Examples of each fuzz test, which are cheap: 10,000 at night.
FUZZ_EXAMPLES = 20 * settings().max_examples

NUMBERS = st.sampled_from([0, 1, 2, 3, -1, 7.5, 1e308, float("nan"), 1 << 63, 10**30, 10**400])
TEXTS = st.sampled_from(["", "77", "0x7", "-7", "\ud800", "\0\n\x1b[2J", "x" * 5000, "chief:0"])
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.one_of(
    LEAVES,
    st.lists(LEAVES, max_size=7),
    st.dictionaries(st.sampled_from(["rank", "peer", "kind", "facts", ""]), LEAVES, max_size=3),
    st.sampled_from([json.loads("[" * 40 + "]" * 40), {"a": {"b": {"c": {}}}}]),
)


def paths_in(note: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each part of a message."""
    parts = note.items() if isinstance(note, dict) else enumerate(note)
    for key, value in parts:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from paths_in(value, (*path, key))


def changed(note: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    result = part = json.loads(json.dumps(note))
    for key in path[:-1]:
        part = part[key]
    change(part, path[-1])
    return result


def texts_like(note: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Generates the message with a part removed, changed or added, damaged bytes, and junk."""
    paths = st.sampled_from(list(paths_in(note)))
    whole = json.dumps(note).encode()
    less = paths.map(lambda path: changed(note, path, lambda part, key: part.__delitem__(key)))
    others = st.tuples(paths, VALUES).map(
        lambda chosen: changed(note, chosen[0], lambda part, key: _set(part, key, chosen[1]))
    )
    more_keys = st.tuples(TEXTS, VALUES).map(lambda pair: {**note, pair[0]: pair[1]})
    damaged = st.tuples(st.integers(0, len(whole)), st.binary(max_size=3)).map(
        lambda cut: whole[: cut[0]] + cut[1] + whole[cut[0] + len(cut[1]) :]
    )
    cut = st.integers(0, len(whole)).map(lambda length: whole[:length])
    junk = st.sampled_from([b"", b"[]", b"null", b"7", b'""', b"[" * 60_000, b"7" * 60_000])
    return st.one_of(
        st.one_of(less, others, others, more_keys, VALUES).map(lambda n: json.dumps(n).encode()),
        st.one_of(damaged, cut, junk, st.binary(max_size=60)),
    )


def _set(part: Any, key: Any, value: Any) -> None:
    part[key] = value
