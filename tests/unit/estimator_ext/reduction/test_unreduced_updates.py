"""Every kind of update of a trainable variable: reduced, or refused before the first step."""

from __future__ import annotations

from programs.update_kinds import KINDS


def test_the_table_has_every_optimizer_and_no_name_twice() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 40
    assert all(kind.note for kind in KINDS if "mean" not in kind.expected)
