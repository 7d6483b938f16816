"""Published programs, unmodified: two ranks train what one process trains, or are refused.

These tests need an environment with the packages of published.txt (`make nightly`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from programs.corpus.run import PROGRAMS, measure, unexpected

pytestmark = pytest.mark.timeout(1300)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_train_as_one_process_or_are_refused(name: str, scratch: Path) -> None:
    result = measure(PROGRAMS[name], scratch)
    logs = [log.read_text()[-4000:] for log in sorted((scratch / name).glob("*.log"))]
    assert not unexpected(PROGRAMS[name], result), "\n".join(logs)
