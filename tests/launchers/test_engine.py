"""The seam between the launcher and its machines: places that come late, or not at all."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence

import pytest
from harness import python
from launcher import launched, lines_of

from hostopt.errors import ResourceError
from hostopt.launch import restarts
from hostopt.launch.engine import LocalEngine, Place, Poll

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")

FAILS_BELOW_3 = """
    import json, os, sys
    config = json.loads(os.environ["TF_CONFIG"])["cluster"]
    print(os.environ["HOSTOPT_SLOT"], 1 + len(config.get("worker", [])))
    sys.exit(200 if len(config.get("worker", [])) < 2 else 0)
"""


class LateReservation:
    """Places that are ready after a number of polls."""

    def __init__(self, poll: Poll, slots: Sequence[int], polls: int) -> None:
        self._poll = poll
        self._slots = slots
        self._polls = polls

    def poll(self) -> Sequence[Place] | None:
        self._polls -= 1
        if self._polls >= 0:
            return None
        if not self._slots:
            raise ResourceError("there are no places. Start more nodes")
        return [place for place in self._poll() or () if place.slot in self._slots]


class ScarceEngine(LocalEngine):
    """An engine whose attempts have the given slots; evaluators have all.

    Args:
      attempts: slots with a place in each attempt.
      size: number of ranks.
    """

    def __init__(self, attempts: list[list[int]], size: int) -> None:
        super().__init__()
        self.wanted: list[tuple[list[int], int]] = []  # slots, and the least number
        self._attempts = attempts
        self._size = size

    @contextlib.contextmanager
    def reserve(self, slots: Sequence[int], least: int) -> Iterator[Poll]:
        with super().reserve(slots, least) as poll:
            if all(slot >= self._size for slot in slots):
                yield LateReservation(poll, slots, 2).poll
            else:
                self.wanted.append((list(slots), least))
                yield LateReservation(poll, self._attempts.pop(0), 2).poll


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)


def test_a_ring_starts_with_the_slots_that_have_a_place(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = ScarceEngine([[0, 2], [], [0, 1, 2]], 3)
    code = launched(python(FAILS_BELOW_3), size=3, min_size=2, max_restarts=2, engine=engine)
    assert code == 0
    assert engine.wanted == [([0, 1, 2], 2)] * 3
    out = capfd.readouterr().out
    assert lines_of(out, "chief:0") == ["0 2", "0 3"]
    assert lines_of(out, "worker:0") == ["2 2", "1 3"]
    assert lines_of(out, "worker:1") == ["2 3"]


def test_a_run_without_places_ends_with_their_error(caplog: pytest.LogCaptureFixture) -> None:
    code = launched(python("pass"), size=2, engine=ScarceEngine([[]], 2))
    assert code == ResourceError.exit_code
    assert "the launcher: ResourceError" in caplog.text or "there are no places" in caplog.text


def test_an_evaluator_waits_for_the_addresses_of_the_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = """
        import json, os
        print(sorted(json.loads(os.environ["TF_CONFIG"])["cluster"]))
    """
    engine = ScarceEngine([[0, 1]], 2)
    assert launched(python(code), size=2, evaluators=1, engine=engine) == 0
    out = capfd.readouterr().out
    jobs = ["['chief', 'evaluator', 'worker']"]
    assert [lines_of(out, task) for task in ("chief:0", "worker:0", "evaluator:0")] == [jobs] * 3


def test_a_wait_for_places_can_be_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt  # as Ctrl-C does before the launcher forwards signals

    class Engine(LocalEngine):
        @contextlib.contextmanager
        def reserve(self, slots: Sequence[int], least: int) -> Iterator[Poll]:
            yield interrupted

    assert launched(python("pass"), size=1, evaluators=1, engine=Engine()) == 128 + signal.SIGINT
    assert "interrupted before any task has started" in caplog.text
