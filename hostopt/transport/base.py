"""The interface of a transport: tagged messages between ranks, each wait with a deadline.

A transport knows ranks and tags. It does not know arrays or algorithms. Messages from one rank to
another arrive in the order in which they are sent; the receiver selects them by tag. `send` and
`recv` are coroutines that run on the event loops of the process.

The rank that detects an error calls `abort`, which aborts the ring on all ranks. `recv`, `send`
and `abort_on_mismatch` do so themselves, so their callers only propagate the error.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError, HostOptError, PeerLostError, ResourceError, error_from_dict
from hostopt.options import Options
from hostopt.process import descriptors
from hostopt.process.error_report import cause_of
from hostopt.telemetry.flight_recorder import FlightRecorder
from hostopt.telemetry.timeline import Timeline
from hostopt.transport import event_loop
from hostopt.transport.addresses import is_local
from hostopt.transport.mailbox import Mailbox
from hostopt.transport.message import Payload, Tag, Traffic, channel_number
from hostopt.transport.mismatch import (
    CallLog,
    DeadlockWatch,
    busy_s,
    find_mismatch,
    is_same_call,
    refusal,
)
from hostopt.transport.stall import Status, Wait, build_status, find_culprit

_log = logging.getLogger(__name__)

# Largest messages by default: between hosts, on one host, and if that has more ranks than cores.
# Small ones are added while they are in the cache of the core, and large ones cost fewer calls.
_SEGMENT_BYTES, _LOCAL_SEGMENT_BYTES, _CROWDED_SEGMENT_BYTES = 512 << 10, 2 << 20, 8 << 20


class Transport(abc.ABC):
    """Tagged messages between the ranks of one cluster."""

    def __init__(self, cluster: Cluster, options: Options) -> None:
        if cluster.rank is None:
            raise ConfigError(f"{cluster.task} is not part of the ring. Call this on ranks only")
        if not options.segment_bytes:  # the same on all ranks, which compare it
            options = replace(options, segment_bytes=_segment_bytes(cluster))
        self.cluster = cluster
        self.options = options
        self.rank: int = cluster.rank
        self.size = cluster.size
        self.segment_bytes = options.segment_bytes
        self.streams = 1  # event loops that share a large collective, the same on all ranks
        self.traffic = Traffic()
        self.mailbox = Mailbox(
            cluster,
            options,
            on_stall=lambda *args: event_loop.start(self._report_stall(*args)),
            on_long_wait=lambda wait: event_loop.start(self._compare_calls(wait)),
        )
        self.recorder = FlightRecorder(self.rank, options.debug_dir)
        if self.size > 1:
            self.mailbox.on_failure(lambda _: self.recorder.start_dump(self.status()))
        self.timeline: Timeline | None = None  # records messages, if set
        self.training_step: int | None = None  # global_step of an Estimator, for observers
        self._channels: dict[int, str] = {}  # name and duplicate by channel number
        self._duplicates: collections.Counter[str] = collections.Counter()
        self._opening = threading.Lock()
        self._counting = threading.Lock()
        self.call_log = CallLog()
        self._deadlocks = DeadlockWatch(self.size, options.stall_warning_s)
        self.finishes = itertools.count()  # number of the next call of `Communicator.finish`

    # -- messages --------------------------------------------------------------------------

    @abc.abstractmethod
    async def send(
        self, peer: int, tag: Tag, payload: Payload, name: str = "", lazily: bool = False
    ) -> None:
        """Sends a message; the payload may be changed once this returns.

        With `lazily`, it may be changed once the peer has it, or after the scope of `sending`.
        """

    @contextlib.asynccontextmanager
    async def sending(self, peer: int, tag: Tag, name: str = "") -> AsyncIterator[None]:
        """The scope of lazy sends to a peer, from this event loop; see `send`."""
        yield  # by default, `send` has copied everything

    async def send_marker(self, peer: int, marker: Tag, name: str = "") -> None:
        """Sends a finish marker behind all messages that this rank has sent to the peer."""
        await self.send(peer, marker, b"", name)

    async def recv(
        self, peer: int, tag: Tag, name: str = "", into: memoryview | None = None
    ) -> memoryview:
        """Waits for a message. An error aborts the ring, as no rank can continue.

        The result is read-only, in `into`, which saves a copy, or elsewhere. The content of `into`
        is undefined after an error.
        """
        try:
            sent_tag, payload = await self.mailbox.take(peer, tag, name, into)
        except HostOptError as error:
            self.abort(error)
            raise
        if sent_tag.signature != tag.signature:
            raise await event_loop.run_on(0, self.abort_on_mismatch(peer, tag))
        return payload

    def blocked_sends(self) -> dict[int, float]:
        """Returns since when each peer takes none of its data, on the monotonic clock."""
        return {}

    def send_time_s(self) -> float:
        """Returns how long messages have waited so far until the peer or the network took them."""
        return 0.0

    def open_channel(self, name: str) -> int:
        """Returns a new channel's number, the same on all ranks; see `Communicator.duplicate`."""
        with self._opening:
            self._duplicates[name] += 1
            full_name = f"{name} ({self._duplicates[name]})"
            number = channel_number(full_name)
            if number in self._channels:
                raise ConfigError(
                    f"channels {self._channels[number]!r} and {full_name!r} have the same number "
                    f"{number}. Rename one of the two tensors or duplicates"
                )
            self._channels[number] = full_name
        return number

    def _count(self, payload_bytes: int) -> None:
        with self._counting:
            self.traffic.messages += 1
            self.traffic.payload_bytes += payload_bytes

    # -- calls of the ranks ----------------------------------------------------------------

    async def abort_on_mismatch(self, peer: int, tag: Tag) -> HostOptError:
        """Aborts the ring as a peer makes another call; returns the error of all ranks."""
        error = await find_mismatch(self.cluster, peer, tag, self.request_status)
        self.abort(error)
        return self.error or error

    async def _compare_calls(self, wait: Wait) -> None:
        status = await self.request_status(wait.peer, self.rank, wait.tag)
        if self.error is not None or status is None:
            return
        if status["error"]:  # its message may be lost
            self.abort(error_from_dict(status["error"]))
        calls = self.call_log.last(wait.tag.channel), status["call"]
        made = [call for call in calls if call is not None and is_same_call(call, wait.tag)]
        if status["refused"]:
            self.abort(refusal(self.cluster, wait.peer, status["refused"]))
        elif len({call["checksum"] for call in made}) == 2:
            await self.abort_on_mismatch(wait.peer, wait.tag)
        elif self._deadlocks.is_due(self.rank, wait, self.mailbox.waits()):
            error = await self._deadlocks.look(
                self.cluster, wait.tag, self.request_status, self.streams
            )
            if error is not None:
                self.abort(error)

    # -- status and stalls -----------------------------------------------------------------

    def status(self) -> Status:
        """Returns what this rank is doing: see `stall.build_status`."""
        return build_status(
            self.mailbox.waits(), self.blocked_sends(), self.recorder.last, self.error
        )

    def status_for(self, waiting: int, tag: Sequence[int]) -> Status:
        """Returns `status` for a rank that waits for a message of this one, and some more.

        Also whether this rank has "sent" the message, its last "call" on that channel, why it has
        "refused" the call of the message, and `busy_s` of its process.
        """
        sent = self.recorder.has_sent(waiting, tag)
        return {**self.status(), "sent": sent, **self.call_log.about(tag), "busy_s": busy_s()}

    @abc.abstractmethod
    async def request_status(self, peer: int, waiting: int, tag: Sequence[int]) -> Status | None:
        """Returns `status_for` these arguments on a rank; None if it does not answer soon."""

    async def _report_stall(self, wait: Wait, has_timed_out: bool) -> None:
        """Names the rank that keeps this one waiting, in a warning or the aborting error."""
        try:
            culprit = await find_culprit(self.cluster, wait.peer, wait.tag, self.request_status)
        except HostOptError as error:
            self.abort(error)
            return
        has_ended = not any(each is wait for each in self.mailbox.waits())
        if self.error is not None or (has_timed_out and has_ended):
            return
        if has_timed_out:
            self.abort(self.mailbox.timeout_error(wait, culprit.rank, culprit.text))
        elif has_ended:
            _log.warning("%s, and continues now", self.mailbox.describe(wait))
        else:
            _log.warning("%s: %s", self.mailbox.describe(wait), culprit.text)

    # -- end -------------------------------------------------------------------------------

    @property
    def error(self) -> HostOptError | None:
        """The error that aborted this ring, with the same root cause on every rank."""
        return self.mailbox.error

    def abort(self, error: BaseException) -> None:
        """Aborts the ring on all ranks. The first error wins: all ranks report it."""
        if not isinstance(error, HostOptError):
            is_out, cause = descriptors.is_out(error), cause_of(error)
            text = descriptors.advice(error) if is_out else f"Root cause: {cause}"
            error = (ResourceError if is_out else PeerLostError)(
                f"{self.cluster.describe(self.rank)} stopped with an error. {text}",
                **self.cluster.attributes(self.rank),
                root_cause=cause,
            )
        self._abort(error)

    @abc.abstractmethod
    def _abort(self, error: HostOptError) -> None: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the ring in good order: messages that were sent before are still delivered."""

    def _wait_for_dump(self) -> None:
        if self.size > 1 and self.error is not None:
            self.recorder.wait_for_dump()


def _segment_bytes(cluster: Cluster) -> int:
    if not is_local(cluster):
        return _SEGMENT_BYTES
    is_crowded = cluster.size > (os.cpu_count() or 1)
    return _CROWDED_SEGMENT_BYTES if is_crowded else _LOCAL_SEGMENT_BYTES
