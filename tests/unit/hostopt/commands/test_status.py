"""`hostopt status`: what each rank does, and which rank the others wait for."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from callers import beside_a_ring
from rings import Spawn
from statuses import DETAILS, Holder, waits

from hostopt import lock_file
from hostopt.collectives.communicator import Communicator
from hostopt.commands import status
from hostopt.commands.status import format_overview
from hostopt.errors import AuthError, PeerLostError, ProtocolError
from hostopt.options import Options
from hostopt.transport import security
from hostopt.transport.grpc import observer
from hostopt.transport.grpc.observer import Observation

TASKS = [{"task": f"worker:{index}", "address": f"h{index}:1"} for index in range(3)]


# --- the table --------------------------------------------------------------------------------


def lines_of(*ranks: Any) -> list[str]:
    return format_overview({"ring": TASKS[: len(ranks)], "ranks": ranks}).splitlines()


def test_the_table() -> None:
    header, *rows = lines_of(DETAILS, waits(0, 0.25), "no answer for 2 s")
    assert re.split(" {2,}", header) == [
        "rank",
        "task",
        "address",
        "step",
        "memory",
        "hostopt",
        "TensorFlow",
        "Python",
        "state",
    ]
    shown = ["7", "3 MiB", "0.1.0", "-", "3.11"]
    assert [re.split(" {2,}", row) for row in rows] == [
        ["0", "worker:0", "h0:1", *shown, "in no collective for 2.0 s, after kernel"],
        ["1", "worker:1", "h1:1", *shown, "has waited 0.2 s for rank 0: kernel"],
        ["2", "worker:2", "h2:1", *"-----", "no answer for 2 s"],
    ]


def test_a_ring_without_an_estimator_shows_the_number_of_the_last_call() -> None:
    assert "  call 4  " in lines_of({**DETAILS, "step": None})[1]
    assert "  -  " in lines_of({**DETAILS, "step": None, "last": None})[1]


def test_memory_that_is_not_known() -> None:
    assert "  7     -       0.1.0  " in lines_of({**DETAILS, "memory_bytes": None})[1]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"last": None}, "in no collective so far"),
        ({"missing": [1, 2]}, "waits for ranks 1, 2 to connect"),
        ({"send": {"peer": 1, "for_s": 3.0}}, "rank 1 has taken no data for 3.0 s"),
        ({"error": "PeerLostError: rank 1 lost"}, "aborted: PeerLostError: rank 1 lost"),
    ],
)
def test_states(changes: dict[str, Any], state: str) -> None:
    assert lines_of({**DETAILS, **changes}, DETAILS, DETAILS)[1].endswith(f"  {state}")


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (
            [waits(1), waits(2), DETAILS],
            "all others wait for rank 2 (worker:2, h2:1), which is in no collective for 2.0 s, "
            "after kernel",
        ),
        (
            [waits(1), "no answer for 2 s", DETAILS],
            "rank 0 waits for rank 1 (worker:1, h1:1), which does not answer: it is frozen, "
            "cannot run Python, or is gone",
        ),
        (
            [waits(1), waits(0), waits(0)],
            "all others wait for rank 0 (worker:0, h0:1), which waits for rank 1: they wait for "
            "each other",
        ),
    ],
)
def test_the_rank_that_the_others_wait_for(ranks: list[Any], line: str) -> None:
    assert lines_of(*ranks)[4:] == [line]


def test_a_slow_link() -> None:
    sends = {**DETAILS, "send": {"peer": 0, "for_s": 5.0}}
    assert lines_of(waits(1), sends, waits(0))[4:] == [
        "all others wait for rank 1 (worker:1, h1:1), which sends to rank 0: the link between "
        "them is slow"
    ]


def test_a_short_wait_is_no_one_s_fault() -> None:
    assert len(lines_of(waits(1, 0.5), DETAILS, DETAILS)) == 4


def test_texts_of_ranks_cannot_control_the_terminal() -> None:
    evil = "\x1b[2J\r\n\u202e\u009b" + "x" * 1000
    tasks = [{"task": evil, "address": evil}, TASKS[1]]
    versions = dict.fromkeys(("hostopt", "python", "tensorflow"), evil)
    details = {**waits(1, what=evil), "error": evil, "versions": versions}
    for ranks in ([details, evil], [{**details, "error": None}, {**DETAILS, "error": evil}]):
        shown = format_overview({"ring": tasks, "ranks": ranks})
        assert all(line.isprintable() for line in shown.split("\n"))
        assert len(shown.split("\n")) == 4
        assert len(shown) < 5000


# --- rings of processes -----------------------------------------------------------------------


def test_observers_at_the_same_time_share_one_round(
    spawn_grpc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    on_details = Observation.on_details

    async def count(observation: Observation, *arguments: Any) -> bytes:
        asked.append(observation._peers.rank)
        return await on_details(observation, *arguments)

    monkeypatch.setattr(Observation, "on_details", count)
    monkeypatch.setattr("hostopt.transport.grpc.limits.OBSERVE_EVERY_S", 1000.0)

    def observe(communicator: Communicator) -> None:
        address = communicator.transport.cluster.ring[0].address
        for _ in range(20):
            overview = observer.observe(address, Options())
            assert len(overview["ranks"]) == 2

    beside_a_ring(spawn_grpc, observe)
    assert asked == [1]


# --- addresses that are no ranks --------------------------------------------------------------


def test_nothing_listens() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLostError, match=r"nothing listens at 127\.0\.0\.1:"):
            observer.observe(f"127.0.0.1:{holder.getsockname()[1]}", Options())


def test_another_program_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "ANSWER_S", 0.05)
    monkeypatch.setattr(security, "_PROBE_TIMEOUT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(PeerLostError, match="accepts connections but does not answer"),
    ):
        observer.observe(f"127.0.0.1:{server.getsockname()[1]}", Options())


def test_another_service(spawn_grpc: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        communicator.barrier()
        if communicator.rank == 0:
            address = communicator.transport.cluster.ring[1].address
            with pytest.raises(ProtocolError, match=r"UNIMPLEMENTED.*another program listens"):
                observer.observe(address, Options(), service="hostopt.Other")
        communicator.barrier()

    spawn_grpc(2, work)


def test_a_refusal_cannot_control_the_terminal() -> None:
    def refuse(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "\x1b[2J" + "x" * 1000)

    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool)
        methods = {"Observe": grpc.unary_unary_rpc_method_handler(refuse)}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("hostopt.Ring", methods)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(AuthError) as caught:
            observer.observe(f"127.0.0.1:{port}", Options())
        server.stop(None).wait(10)
    assert "refuses this command: ?[2Jxxx" in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


# --- a model_dir ------------------------------------------------------------------------------


def test_loopback_addresses_of_another_host_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Holder(tmp_path, ["127.0.0.1:1", "127.0.0.1:2"]):
        monkeypatch.setattr(lock_file.socket, "gethostname", lambda: "another")
        with pytest.raises(status.ConfigError, match="can be reached on that host only"):
            status._holder_of(str(tmp_path))
