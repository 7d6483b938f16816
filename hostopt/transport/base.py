"""What every transport does: tagged messages between ranks, each wait with a deadline.

A transport knows ranks and tags, no arrays and no algorithms. Messages from one rank to another
arrive in the order in which a collective sends them; a receiver picks them by tag. Whoever sends
and receives is a coroutine, and runs on the loop of the process.
"""

from __future__ import annotations

import abc
import collections
import hashlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from hostopt.cluster import Cluster
from hostopt.errors import ConfigError, HostOptError, error_to_dict
from hostopt.flight_recorder import FlightRecorder
from hostopt.options import Options
from hostopt.timeline import Timeline
from hostopt.transport import event_loop
from hostopt.transport.mailbox import Mailbox, Wait
from hostopt.transport.mismatch import find_mismatch, is_same_call
from hostopt.transport.signature import Signature
from hostopt.transport.stall import find_culprit, status_of

__all__: list[str] = []

_log = logging.getLogger(__name__)

_RECORD_TIMEOUT_S = 1.0

Payload = Union[bytes, memoryview]

# Channel of `Communicator.finish`; bucket 1 on it is the marker "I send nothing more for now".
FINISH_CHANNEL = 0xFFFF_FFFF


class Tag(NamedTuple):
    """Which message this is; the same numbers on both sides.

    Args:
      channel: the communicator, as duplicates of one transport must not mix.
      step: sequence number of the collective on its channel.
      bucket: gradient bucket, 0 where there is only one.
      round: round of the ring schedule.
      chunk: part of the buffer that one rank reduces.
      segment: part of the chunk that travels as one message.
      layout: checksum of the call's `Signature`, the same on both sides.
    """

    channel: int
    step: int
    bucket: int = 0
    round: int = 0
    chunk: int = 0
    segment: int = 0
    layout: int = 0

    @property
    def is_finish_marker(self) -> bool:
        """True for the message with which a rank says that it only waits for the others."""
        return self.channel == FINISH_CHANNEL and self.bucket == 1

    def __str__(self) -> str:
        return (
            f"step {self.step}, bucket {self.bucket}, round {self.round}, chunk {self.chunk}, "
            f"segment {self.segment}"
        )


@dataclass
class Traffic:
    """What this rank has sent so far.

    Args:
      messages: number of messages.
      payload_bytes: bytes of data.
      header_bytes: bytes of frame headers.
    """

    messages: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0


class Transport(abc.ABC):
    """Tagged messages between the ranks of one cluster.

    Args:
      cluster: the ring and this rank's place in it.
      options: deadlines and sizes.
    """

    def __init__(self, cluster: Cluster, options: Options) -> None:
        if cluster.rank is None:
            raise ConfigError(f"{cluster.task} is an evaluator: it takes no part in the ring")
        self.cluster = cluster
        self.options = options
        self.rank: int = cluster.rank
        self.size = cluster.size
        self.traffic = Traffic()
        self.mailbox = Mailbox(cluster, options, self._on_stall, self._on_long_wait)
        self.recorder = FlightRecorder(self.rank, options.debug_dir)
        self._recorded = threading.Event()
        if self.size > 1:
            self.mailbox.on_failure(self._start_record)
        self.timeline: Timeline | None = None  # where messages are shown
        self._channels: dict[int, str] = {}  # by number, which duplicate of which name it is
        self._duplicates: collections.Counter[str] = collections.Counter()
        self._opening = threading.Lock()
        self._last_calls: dict[int, tuple[int, int, Signature]] = {}  # by channel

    @abc.abstractmethod
    async def send(self, peer: int, tag: Tag, payload: Payload, what: str = "") -> None:
        """Hand a message over for delivery; the payload may be changed once this returns.

        Args:
          peer: rank to send to.
          tag: which message this is.
          payload: contiguous bytes.
          what: what is sent, for error messages.

        Raises:
          HostOptError: the ring has failed, or the peer takes no data before the deadline.
        """

    async def recv(self, peer: int, tag: Tag, what: str = "") -> memoryview:
        """Wait for a message; an error ends the ring for all ranks, as no rank can go on.

        Args:
          peer: rank to receive from.
          tag: which message.
          what: what is waited for, for warnings and error messages.

        Returns:
          The payload, read-only.

        Raises:
          HostOptError: the ring has failed, the peer has left, or the deadline has passed.
        """
        try:
            found, payload = await self.mailbox.take(peer, tag, what)
        except HostOptError as error:
            self.abort(error)
            raise
        if found.layout != tag.layout:
            raise await self.mismatch(peer, tag)
        return payload

    def begin(self, channel: int, step: int, bucket: int, signature: Signature) -> None:
        """Note the call that this rank makes on a channel, for others that ask.

        Args:
          channel: channel of the communicator.
          step: number of the call on it.
          bucket: gradient bucket.
          signature: what must be the same on all ranks.
        """
        self._last_calls[channel] = step, bucket, signature

    def call_on(self, channel: int) -> dict[str, Any] | None:
        """The last call that this rank has made on a channel, as JSON can hold it.

        Args:
          channel: channel of a communicator.

        Returns:
          Its step, bucket, signature and checksum; None if there was none.
        """
        call = self._last_calls.get(channel)
        if call is None:
            return None
        step, bucket, (text, checksum) = call
        return {"step": step, "bucket": bucket, "signature": text, "checksum": checksum}

    async def mismatch(self, peer: int, tag: Sequence[int]) -> HostOptError:
        """End the ring because a peer makes another call than this rank.

        Args:
          peer: which rank.
          tag: a message of this rank's call.

        Returns:
          The error that all ranks report.
        """
        error = await find_mismatch(self, peer, tag)
        self.abort(error)
        return self.error or error

    @abc.abstractmethod
    async def ask(self, peer: int, waiting: int, tag: Sequence[int]) -> dict[str, Any] | None:
        """Ask a peer what it does.

        Args:
          peer: which rank.
          waiting: rank that waits for it.
          tag: the message that is waited for.

        Returns:
          Its `stall.status_of`, in "sent" whether it has sent that message, and in "call" its
          `call_on` that channel; None where it does not answer soon.
        """

    def blocked_sends(self) -> dict[int, float]:
        """Since when a message to a peer waits for the peer, or for the network, to take it."""
        return {}

    def sending_s(self) -> float:
        """How long messages have waited so far to be taken by a peer or by the network."""
        return 0.0

    def _on_long_wait(self, wait: Wait) -> None:
        event_loop.start(self._compare(wait))

    async def _compare(self, wait: Wait) -> None:
        """End the ring if the peer makes another call at the same place: it will never send."""
        answer = await self.ask(wait.peer, self.rank, wait.tag)
        own, theirs = self.call_on(wait.tag.channel), answer and answer.get("call")
        if self.error is not None or own is None or theirs is None:
            return
        together = is_same_call(own, wait.tag) and is_same_call(theirs, wait.tag)
        if together and own["checksum"] != theirs["checksum"]:
            await self.mismatch(wait.peer, wait.tag)

    def _on_stall(self, wait: Wait, gives_up: bool) -> None:
        event_loop.start(self._explain(wait, gives_up))

    async def _explain(self, wait: Wait, gives_up: bool) -> None:
        """Say who keeps this rank waiting: a warning, or the error that ends the ring."""
        try:
            culprit = await find_culprit(self, wait.peer, wait.tag)
        except HostOptError as error:
            self.abort(error)
            return
        has_ended = not any(each is wait for each in self.mailbox.waits())
        if self.error is not None or (gives_up and has_ended):
            return
        if gives_up:
            self.abort(self.mailbox.timeout(wait, culprit.rank, culprit.text))
        elif has_ended:
            _log.warning("%s, and goes on now", self.mailbox.waiting_text(wait))
        else:
            _log.warning("%s: %s", self.mailbox.waiting_text(wait), culprit.text)

    def _start_record(self, error: HostOptError) -> None:
        """Write the record in a thread: a disk that hangs must not keep the error from others."""
        facts = {**status_of(self), "error": error_to_dict(error)}

        def write() -> None:
            try:
                self.recorder.write(facts)
            finally:
                self._recorded.set()

        try:
            threading.Thread(target=write, daemon=True, name="hostopt-record").start()
        except RuntimeError:  # no thread starts while Python ends
            self._recorded.set()

    def _finish_record(self) -> None:
        """Wait for the record, which may not have begun when a rank hears of the error."""
        if self.size > 1 and self.error is not None:
            self._recorded.wait(_RECORD_TIMEOUT_S)

    @property
    def error(self) -> HostOptError | None:
        """The error that ended this ring, the same root cause on every rank."""
        return self.mailbox.error

    @abc.abstractmethod
    def abort(self, error: BaseException) -> None:
        """End the ring for all ranks; the first error is the one that all of them report.

        Args:
          error: why, either of ours or of the user's code.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the ring in good order. What was sent before is delivered; no error follows."""

    def open_channel(self, name: str) -> int:
        """Number for a new channel: that of its name, in whatever order channels are opened.

        Args:
          name: its name; all ranks open channels of the same name in the same order.

        Returns:
          31 bits, never 0; the same on all ranks.

        Raises:
          ConfigError: another name has the same number.
        """
        with self._opening:
            self._duplicates[name] += 1
            found = f"{name} ({self._duplicates[name]})"
            number = channel_number(found)
            if number in self._channels:
                raise ConfigError(
                    f"channels {self._channels[number]!r} and {found!r} have the same number "
                    f"{number}. Rename one of the two tensors or duplicates"
                )
            self._channels[number] = found
        return number

    def _count(self, payload_bytes: int, header_bytes: int) -> None:
        self.traffic.messages += 1  # on the loop only
        self.traffic.payload_bytes += payload_bytes
        self.traffic.header_bytes += header_bytes


def channel_number(name: str) -> int:
    """The number of a channel's name, the same in every process.

    Args:
      name: any text.

    Returns:
      31 bits, so never `FINISH_CHANNEL`; not 0, which is the first communicator's.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF or 1
