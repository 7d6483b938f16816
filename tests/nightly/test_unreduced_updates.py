"""Every kind of update of a trainable variable: reduced, or refused before the first step."""

from __future__ import annotations

import pytest
from halves import Halves
from programs.update_kinds import KINDS, Kind
from update_checks import STEPS, check_update


@pytest.fixture(scope="module", params=["v2", "v1"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """Trains all selected kinds in one pair of processes; v1 is without v2 behavior."""
    items = [
        item.callspec.params
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    chosen = [each["kind"].name for each in items if each["trained"] == request.param]
    directory, without_v2 = tmp_path_factory.mktemp("kinds"), request.param == "v1"
    return Halves(directory, "update_kinds.py", chosen, STEPS, without_v2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_update_is_reduced_or_refused(trained: Halves, kind: Kind) -> None:
    check_update(trained, kind)
