"""Numbers, names and signatures of collective calls."""

from __future__ import annotations

import numpy as np
import pytest
from threads import in_threads

from hostopt.collectives.call import Channel
from hostopt.options import Options
from hostopt.transport.inproc import InprocTransport
from hostopt.transport.message import UNSIGNED


@pytest.fixture
def channel() -> Channel:
    (transport,) = InprocTransport.connect(1, Options())
    return Channel(transport, 7, "the bread")


def test_calls_are_numbered_in_order(channel: Channel) -> None:
    calls = [channel.next_call(), channel.next_call("flour"), channel.signed_call("barrier")]
    assert [call.step for call in calls] == [0, 1, 2]
    assert [call.name for call in calls] == ["the bread", "flour", "the bread"]
    assert {call.channel for call in calls} == {7}


def test_threads_get_different_numbers(channel: Channel) -> None:
    steps: list[int] = []
    in_threads(lambda _: steps.extend(channel.next_call().step for _ in range(500)), range(4))
    assert sorted(steps) == list(range(2000))


def test_signatures_have_kind_name_dtype_and_shape(channel: Channel) -> None:
    assert channel.next_call().signature is UNSIGNED
    call = channel.signed_call("all_gather", "flour", np.ones((2, 3), np.float32))
    assert call.signature.text == "all_gather of 'flour' float32[2, 3]"
    assert channel.signed_call("barrier").signature.text == "barrier of 'the bread'"


def test_other_ranks_can_ask_for_the_last_call(channel: Channel) -> None:
    channel.signed_call("barrier")
    assert channel.transport.call_log.last(7) is None
    call = channel.begin_call("barrier", "the end")
    last = channel.transport.call_log.last(7)
    assert last is not None
    assert (last["step"], last["signature"]) == (call.step, "barrier of 'the end'")


def test_tags_and_descriptions(channel: Channel) -> None:
    call = channel.signed_call("barrier")
    tag = call.tag(round_=2, chunk=3, segment=4)
    assert tag == (7, 0, 0, 2, 3, 4, call.signature.checksum)
    assert call.in_phase("all-gather") == "the bread (all-gather)"
    assert call._replace(name="").in_phase("all-gather") == "data (all-gather)"
