"""The ring of a single process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hostopt.tensorflow as hvd


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    hvd.init()
    yield
    hvd.shutdown()
