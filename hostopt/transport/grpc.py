"""Messages over gRPC: one stream of frames to each rank that this one sends to.

A rank is at once a server, at its own address, and a client of its peers. The methods carry raw
bytes (generic handlers without serializers), so nothing but frames and small JSON notes travels:

    Hello    JSON, both ways: who are you, and do you know the same ring?
    Stream   frames, one way; ends in good order when the sender leaves
    Status   JSON: what do you wait for?
    Leave    JSON: I go now, because of this error, or with none

A rank has two connections to the one that it sends to: one for frames, and one, as to every peer,
for all the rest, on which gRPC pings. All of it runs on the loop; what users and other threads
call hands work over to it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import enum
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from hostopt import descriptors
from hostopt.cluster import Cluster
from hostopt.error_report import cause_of
from hostopt.errors import (
    AuthError,
    CollectiveTimeoutError,
    ConfigError,
    HostOptError,
    PeerLostError,
    ProtocolError,
    RendezvousTimeoutError,
    ResourceError,
    error_to_dict,
)
from hostopt.options import Options
from hostopt.transport import event_loop, forked
from hostopt.transport.addresses import is_loopback, listen_address
from hostopt.transport.allocator import keep_freed_memory
from hostopt.transport.base import Payload, Tag, Transport
from hostopt.transport.frame import HEADER_BYTES, FrameReader, FrameWriter
from hostopt.transport.grpc_calls import Calls
from hostopt.transport.grpc_import import grpc
from hostopt.transport.grpc_parts import (
    END_OF_STREAM,
    GOODBYE_TIMEOUT_S,
    Stream,
    message_options,
    server_options,
)
from hostopt.transport.meeting import Meeting
from hostopt.transport.notes import read_leave, read_question, read_status
from hostopt.transport.security import Security, probe
from hostopt.transport.stall import status_of

__all__: list[str] = []

_log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0
_HELLO_TIMEOUT_S = 1.0
_AGAIN_AFTER_S = 0.05
# How long a word of the peer may take that says why its connection broke, or that of another rank.
_LAST_WORD_TIMEOUT_S = 0.5
_STATUS_TIMEOUT_S = 1.0
# How long a rank that has found a peer which may not take part stays, to be found as well.
_FOUND_OUT_S = 2.5
_DROP_AFTER_S = 0.1
_SILENT = "no answer to ping, its process is frozen, or its host or link is silent"
_INCARNATION_CHANGED = "incarnation changed, its process was started again"


class _Verdict(enum.Enum):
    """What has become of a peer whose connection broke."""

    GONE = "its process is gone, or another one listens there"
    SILENT = "it does not answer"
    LIVES = "it answers"


class GrpcTransport(Transport):
    """One rank of a ring over gRPC; listens, finds all peers, then sends and receives.

    Args:
      cluster: the ring and this rank's place in it.
      options: deadlines and sizes.
      service: name under which ranks call each other; those of another one never meet.

    Raises:
      ConfigError: the own address is in use, a peer knows another ring, or token or certificates
        are wanted and cannot be used.
      AuthError: a peer has another token, or its certificate or this rank's is not accepted.
      RendezvousTimeoutError: a rank did not appear in time; the message names it.
    """

    def __init__(self, cluster: Cluster, options: Options, service: str = "hostopt.Ring") -> None:
        super().__init__(cluster, options)
        keep_freed_memory()
        self._successor = (self.rank + 1) % self.size
        self._meeting = Meeting(cluster, options)
        self._security = Security(cluster, options)
        self._calls = Calls(cluster, options, self._meeting, self._security, service)
        self._met = False
        self._streams: dict[int, Stream] = {}
        self._ending = threading.RLock()  # held while the ring is failed or closed
        self._closed = False
        self._pid = os.getpid()
        # to peers, of the error that ended the ring
        self._notes: list[concurrent.futures.Future[None]] = []
        self._gone: set[int] = set()  # peers that have left, or whose connection broke
        self._read_from: set[int] = set()  # peers whose stream is open
        self._watches: list[asyncio.Future[None]] = []
        self._to_peer = self._calls.channels
        self._checksum = options.checksum
        if self._checksum is None:
            is_local = all(is_loopback(task.address) for task in cluster.ring)
            self._checksum = not is_local and self._security.tls is None  # TLS has its own
        self._server: grpc.aio.Server | None = None
        self._port = 0  # where it listens
        self._guarding: asyncio.Future[None] | None = None
        self.mailbox.on_failure(self._end_sends)
        event_loop.run(self._serve())
        atexit.register(self.close)
        try:
            event_loop.run(self._rendezvous())
        except BaseException as error:
            self.abort(error)
            if isinstance(error, AuthError):
                event_loop.run(asyncio.sleep(_FOUND_OUT_S))
            self.close()
            raise

    # -- sending ---------------------------------------------------------------------------

    async def send(self, peer: int, tag: Tag, payload: Payload, what: str = "") -> None:
        """See `Transport.send`."""
        if self.error is not None:
            raise self.error
        if self._closed:
            raise PeerLostError("this rank has left the ring", **self._facts(self.rank))
        facts = {**self._facts(peer), "step": tag.step, "bucket": tag.bucket}
        stream = self._stream(peer)
        self._count(len(payload), HEADER_BYTES)
        if await stream.put(tag, payload):
            return
        error: HostOptError
        if stream.ended or self.mailbox.has_left(peer):
            error = PeerLostError(
                f"{self._name(peer)} has left while rank {self.rank} wanted to send "
                f"{what or 'data'} at {tag}. Give all ranks the same number of steps",
                **facts,
            )
        else:
            error = CollectiveTimeoutError(
                f"{self._name(peer)} has taken no data from rank {self.rank} for "
                f"{self.options.collective_timeout_s:g} s, at {tag} of {what or 'data'}. Look "
                "what it does, or raise collective_timeout_s",
                **facts,
                root_cause=f"{self._name(peer)} makes no progress",
            )
        self.abort(error)
        raise self.error or error

    def _stream(self, peer: int) -> Stream:
        if peer not in self._streams:
            channel = self._calls.channel(peer, message_options(self.options))
            writer = FrameWriter(self._meeting.origin(self.rank), bool(self._checksum))
            self._streams[peer] = Stream(
                channel,
                self._calls.stream(peer, channel),
                writer,
                self.options,
                lambda why: self._lost(peer, why),
            )
        return self._streams[peer]

    def blocked_sends(self) -> dict[int, float]:
        """See `Transport.blocked_sends`."""
        since = {peer: stream.writing_since_s for peer, stream in list(self._streams.items())}
        return {peer: since_s for peer, since_s in since.items() if since_s is not None}

    def sending_s(self) -> float:
        """See `Transport.sending_s`."""
        return sum(stream.written_s for stream in list(self._streams.values()))

    # -- losing a peer ---------------------------------------------------------------------

    async def _watch(self, peer: int) -> None:
        """Lose a peer when the connection breaks on which gRPC pings it, and it has gone."""
        channel, has_been_ready = self._to_peer[peer], False
        while True:
            state = channel.get_state(try_to_connect=True)
            if has_been_ready and state is not grpc.ChannelConnectivity.READY:
                error, verdict = await self._examine(peer, "connection reset")
                if verdict is not _Verdict.LIVES:
                    await self._lose(peer, error, verdict)
                    return
            if state is grpc.ChannelConnectivity.READY and not has_been_ready:
                await self._show_itself(peer)
            has_been_ready = state is grpc.ChannelConnectivity.READY
            await channel.wait_for_state_change(state)

    async def _show_itself(self, peer: int) -> None:
        """Call a peer over a new connection, or that would be a stranger's to it."""
        with contextlib.suppress(grpc.aio.AioRpcError, AuthError, ValueError):
            await self._ask_status(peer, {}, _STATUS_TIMEOUT_S)

    async def _lost(self, peer: int, why: str) -> None:
        """The stream to or from a peer broke, which is no news where the peer says goodbye."""
        if not self._closed and not self.mailbox.has_left(peer):
            await self._lose(peer, *await self._examine(peer, why))

    async def _lose(self, peer: int, error: PeerLostError, verdict: _Verdict) -> None:
        """Believe that a peer is lost, unless a word of it or of others comes first."""
        life = self._meeting.incarnations.get(peer)
        # one that lives may not find this one alive: what it says is first
        words = 3 if verdict is _Verdict.LIVES else 1
        await asyncio.sleep(words * _LAST_WORD_TIMEOUT_S)
        if self._closed or self.mailbox.has_left(peer):
            if verdict is not _Verdict.LIVES and peer in self._streams:
                self._streams[peer].cancel()  # nobody takes what `_end` may still flush
            return
        if not self._met:
            if life == self._meeting.incarnations.get(peer):
                _log.warning("before all had met: %s", error)
                self._forget(peer)
            return
        if verdict is _Verdict.GONE:
            self._gone.add(peer)
        self.abort(error)

    async def _examine(self, peer: int, why: str) -> tuple[PeerLostError, _Verdict]:
        """Find out why the connection to a peer broke, and whether the peer lives."""
        try:
            life = (await self._ask_status(peer, {}, _LAST_WORD_TIMEOUT_S))["incarnation"]
        except grpc.aio.AioRpcError as error:
            details = f"{why}, {error.details()}".lower()
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if is_silent or any(word in details for word in ("ping", "keepalive")):
                return self._lost_error(peer, _SILENT), _Verdict.SILENT
            gone = f"connection reset, process gone ({why})"
            return self._lost_error(peer, gone), _Verdict.GONE
        except (AuthError, ValueError):
            life = None  # another program listens there
        if life != self._meeting.incarnations.get(peer):
            return self._lost_error(peer, _INCARNATION_CHANGED), _Verdict.GONE
        # each of the two finds the other one alive: they name the same one
        ends = sorted((self.rank, peer))
        between = " and ".join(self._name(end) for end in ends)
        found = f"the connection between {between} broke ({why}), though both live"
        return self._lost_error(ends[1], found, between), _Verdict.LIVES

    def _lost_error(self, peer: int, found: str, between: str = "") -> PeerLostError:
        facts, at = self._facts(peer), ""
        waits, last = self.mailbox.waits(), self.recorder.last
        if waits:
            tag, what = waits[0].tag, waits[0].what
            facts |= {"step": tag.step, "bucket": tag.bucket}
            at = f" at step {tag.step} while rank {self.rank} waited for {what or 'data'} ({tag})"
        elif last is not None:
            facts |= {"step": last.tag.step, "bucket": last.tag.bucket}
            at = f" at step {last.tag.step}, after rank {self.rank} had {last.kind} {last.what}"
        lost = f"connection between {between}" if between else self._name(peer)
        return PeerLostError(
            f"{self._name(peer)} lost{at}: {found}. Found by rank {self.rank} "
            f"({self.cluster.task}). Look at the output of rank {peer}, then run the same command "
            "again",
            **facts,
            root_cause=f"{lost} lost",
        )

    def _forget(self, peer: int) -> None:
        """A peer begins anew, before all have met."""
        self._meeting.forget(peer)
        self.mailbox.forget(peer)
        self._gone.discard(peer)
        stream = self._streams.pop(peer, None)
        if stream is not None:
            event_loop.start(stream.close())

    # -- receiving -------------------------------------------------------------------------

    async def _serve(self) -> None:
        task = self.cluster.ring[self.rank]
        self._calls.open()
        self._server = grpc.aio.server(options=server_options(self.options, self.size))
        answers = {"Hello": self._on_hello, "Status": self._on_status, "Leave": self._on_leave}
        handlers = self._calls.handlers(self._on_stream, **answers)
        self._server.add_generic_rpc_handlers([handlers])
        address = listen_address(task.address)
        try:
            bound = self._calls.listen(self._server, address)
        except RuntimeError:
            bound = 0
        if not bound:
            descriptors.check_room()
            raise ConfigError(
                f"address {task.address} of this task ({task.name}) is in use or not of this "
                "machine. End the process that listens there (is this task already running?) or "
                "choose another port in TF_CONFIG on all ranks",
                **self._facts(self.rank),
            )
        forked.keep_from_children(bound)
        self._port = bound
        await self._server.start()
        self._guarding = asyncio.ensure_future(self._calls.strangers.watch(address, bound))

    async def _on_stream(self, _: Any, context: grpc.aio.ServicerContext) -> bytes:
        peer = await self._calls.admit_stream(context)
        if peer in self._read_from:
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, f"rank {peer} has a stream already"
            )
        reader = FrameReader(self._meeting.origin(peer))
        self._read_from.add(peer)
        self._calls.strangers.admit_stream(context.peer(), peer)
        why = "connection reset"
        try:
            await context.send_initial_metadata(())  # the peer waits for it
            while (message := await context.read()) is not grpc.aio.EOF:
                if message == END_OF_STREAM:
                    self.mailbox.leave(peer, "it has closed its communicator")
                elif (found := reader.read(message)) is not None:
                    self.mailbox.put(peer, *found)
        except ProtocolError as error:
            self.abort(
                ProtocolError(
                    f"{self._name(peer)} sent to rank {self.rank} ({self.cluster.task}) what "
                    f"cannot be used: {error}",
                    **{**self._facts(peer), "step": error.step, "bucket": error.bucket},
                    root_cause=str(error),
                )
            )
        except (Exception, asyncio.CancelledError) as error:  # how a connection breaks
            why = str(error) or why
        finally:
            self._read_from.discard(peer)
        # not lost where END_OF_STREAM was the last message; gRPC may well cancel this call now
        await asyncio.shield(self._lost(peer, why))
        return b""

    async def _on_status(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        status = {"incarnation": self._meeting.incarnation, **status_of(self)}
        with contextlib.suppress(ValueError):  # some ask for the rest only
            question = read_question(request, self._meeting.most_note_bytes)
            status["sent"] = self.recorder.has_sent(question["waiting"], question["tag"])
            status["call"] = self.call_on(question["tag"][0])
        return json.dumps(status).encode()

    async def ask(self, peer: int, waiting: int, tag: Sequence[int]) -> dict[str, Any] | None:
        """See `Transport.ask`."""
        try:
            question = {"waiting": waiting, "tag": tag}
            return await self._ask_status(peer, question, _STATUS_TIMEOUT_S)
        except (grpc.aio.AioRpcError, AuthError, ValueError):
            return None

    async def _ask_status(
        self, peer: int, question: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """The answer of a peer; a ValueError where what it says cannot be that."""
        data = json.dumps(question).encode()
        answer = await self._calls.ask(peer, "Status", data, timeout_s)
        most_bytes = self._meeting.most_note_bytes
        return read_status(answer, most_bytes, self.size, asked=bool(question))

    # -- beginning -------------------------------------------------------------------------

    async def _on_hello(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        meeting = self._meeting
        try:
            theirs = meeting.read_hello(request)
        except ValueError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no rank of this ring")
        peer, incarnation = theirs["rank"], theirs["incarnation"]
        if meeting.is_another_life(peer, incarnation) and not self.mailbox.has_left(peer):
            await self._check_life(peer, incarnation)
        if peer in meeting.missing:  # later callers are strangers; the answer tells them
            try:
                meeting.check(peer, theirs)
            except ConfigError as error:
                self.abort(error)
            meeting.incarnations[peer] = incarnation
            if peer != self._successor:  # to the successor a connection is needed, not a call
                meeting.missing.discard(peer)
        return json.dumps(meeting.hello(to=peer)).encode()

    async def _check_life(self, peer: int, incarnation: str) -> None:
        """Believe that a peer was started again where the one at its address says so."""
        try:
            answer = await self._ask_status(peer, {}, _STATUS_TIMEOUT_S)
        except (grpc.aio.AioRpcError, AuthError, ValueError):
            return
        if answer["incarnation"] != incarnation:
            return  # a stranger, such as the same task on another host
        if not self._met:
            self._forget(peer)
        else:  # before its connection was found broken
            self._gone.add(peer)
            self.abort(self._lost_error(peer, _INCARNATION_CHANGED))

    async def _rendezvous(self) -> None:
        """Say hello to every peer until all have answered, or have called themselves."""
        started = time.monotonic()
        report_at_s = _PROGRESS_EVERY_S
        missing = self._meeting.missing
        while missing and self.error is None:
            await asyncio.gather(*map(self._greet, list(missing)))
            waited_s = time.monotonic() - started
            names = self._meeting.missing_names()
            if names and waited_s >= self.options.rendezvous_timeout_s:
                raise RendezvousTimeoutError(
                    f"{self._name(self.rank)} has waited {waited_s:.0f} s, missing: {names}. "
                    "Start them, or correct their addresses in TF_CONFIG",
                    **self._facts(min(missing)),
                    root_cause=f"missing: {names}",
                )
            if names and waited_s >= report_at_s:
                _log.warning("rank %d has waited %.0f s, missing: %s", self.rank, waited_s, names)
                report_at_s += _PROGRESS_EVERY_S
        if self.error is not None:
            raise self.error
        self._met = True
        self._watches = [asyncio.ensure_future(self._watch(peer)) for peer in self._to_peer]

    async def _greet(self, peer: int) -> None:
        meeting = self._meeting
        timeout_s = min(_HELLO_TIMEOUT_S, self.options.rendezvous_timeout_s)
        request = json.dumps(meeting.hello()).encode()
        try:
            answer = await self._calls.ask(peer, "Hello", request, timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            answer = b""
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a doctor, or a stranger
                meeting.reasons[peer] = "runs another program"
                await asyncio.sleep(_AGAIN_AFTER_S)
        await self._check_certificates(peer, bool(answer))
        if self.mailbox.has_left(peer):
            meeting.missing.discard(peer)
        if not answer or peer not in meeting.missing:
            return
        try:
            hello = meeting.read_hello(answer)
        except ValueError:
            meeting.reasons[peer] = "runs another program"
            await asyncio.sleep(_AGAIN_AFTER_S)
            return
        if hello.get("met") != meeting.incarnation:  # it is in an earlier ring still
            meeting.reasons[peer] = (
                "knows an earlier incarnation of this rank, and is to end first"
            )
            await asyncio.sleep(_AGAIN_AFTER_S)
            return
        meeting.reasons.pop(peer, None)
        meeting.check(peer, hello)
        if meeting.is_another_life(peer, hello["incarnation"]):
            self._forget(peer)
        meeting.incarnations[peer] = hello["incarnation"]
        if peer != self._successor or await self._stream(peer).opened(timeout_s):
            meeting.missing.discard(peer)

    async def _check_certificates(self, peer: int, answers: bool) -> None:
        """Find out whether certificates are why a peer does not answer, or will not call."""
        found = None
        if not answers and peer in self._meeting.missing:
            found = await probe(self.cluster.ring[peer].address, self._security.tls)
        if self._security.own_fault is not None and (answers or found):
            raise self._calls.refusal(
                self.rank, f"is refused by others: {self._security.own_fault}"
            )
        if found is not None:
            raise self._calls.refusal(peer, found)

    # -- end -------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """See `Transport.abort`."""
        if not isinstance(error, HostOptError):
            is_out, cause = descriptors.is_out(error), cause_of(error)
            text = descriptors.advice(error) if is_out else f"Root cause: {cause}"
            error = (ResourceError if is_out else PeerLostError)(
                f"{self._name(self.rank)} stopped with an error. {text}",
                **self._facts(self.rank),
                root_cause=cause,
            )
        with self._ending:
            if not self._closed and self.mailbox.fail(error):
                self._tell_all(error)

    def close(self) -> None:
        """See `Transport.close`."""
        if os.getpid() != self._pid:  # a child of fork(), which has no loop
            return
        with self._ending:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        event_loop.run(self._end())
        self._finish_record()

    async def _end(self) -> None:
        streams = list(self._streams.values())
        if self.error is None:
            await asyncio.gather(*(stream.flush() for stream in streams))
            await asyncio.gather(*map(self._leave, self._to_peer.keys() - self._gone))
        if self._notes:
            notes = [asyncio.wrap_future(note) for note in self._notes]
            await asyncio.wait(notes, timeout=GOODBYE_TIMEOUT_S)
        for watch in (*self._watches, *([self._guarding] if self._guarding else ())):
            watch.cancel()
        closing = [stream.close() for stream in streams]
        closing += [channel.close() for channel in self._to_peer.values()]
        closed = [asyncio.ensure_future(each) for each in closing]
        if closed:
            await asyncio.wait(closed, timeout=GOODBYE_TIMEOUT_S)
        if self._server is not None:  # peers end their streams when they are told
            stopped = self._server.stop(GOODBYE_TIMEOUT_S if self.error is None else 0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped, 2 * GOODBYE_TIMEOUT_S)
        forked.forget(self._port)

    def _end_sends(self, error: HostOptError) -> None:
        """End what waits for a peer to take data, soon after the peers have been told why."""
        event_loop.start(self._drop_streams())

    async def _drop_streams(self) -> None:
        await asyncio.sleep(_DROP_AFTER_S)
        for stream in self._streams.values():
            stream.cancel()

    def _tell_all(self, error: HostOptError) -> None:
        """Start to tell the peers why this rank ends."""
        for peer in self._to_peer.keys() - self._gone:
            self._notes.append(event_loop.start(self._leave(peer, error_to_dict(error))))

    async def _leave(self, peer: int, error: dict[str, Any] | None = None) -> None:
        meeting = self._meeting
        note: dict[str, Any] = {"sender": self.rank, "from": meeting.incarnation}
        note["to"] = meeting.incarnations.get(peer)
        if error:
            note["error"] = error
        data = json.dumps(note, default=str).encode()
        timeout_s = GOODBYE_TIMEOUT_S if self._met else _LAST_WORD_TIMEOUT_S
        with contextlib.suppress(grpc.aio.AioRpcError, AuthError):
            await self._calls.ask(peer, "Leave", data, timeout_s, wait_for_ready=True)

    async def _on_leave(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            note, error = read_leave(request, self._meeting.most_note_bytes)
            sender, to, life = note["sender"], note["to"], note["from"]
            is_rank = sender in self._to_peer
        except ValueError:
            is_rank = False
        if not is_rank:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no goodbye of a peer")
        meeting = self._meeting
        known = to == meeting.incarnation and life == meeting.incarnations.get(sender, life)
        # without an incarnation it comes from a rendezvous that has failed
        if not known and (self._met or to is not None):
            return b""
        if error is not None:
            self._gone.add(sender)  # it need not be told what it tells
            self.abort(error)  # the sender may not reach all whom this one does
            return b""
        self.mailbox.leave(sender, "it has closed its communicator")
        self._gone.add(sender)
        if sender in self._streams:
            self._streams[sender].cancel()  # the peer takes nothing more: let it go quietly
        return b""

    def _name(self, peer: int) -> str:
        return f"rank {peer} ({self.cluster.ring[peer]})"

    def _facts(self, peer: int) -> dict[str, Any]:
        task = self.cluster.ring[peer]
        return {"rank": peer, "task": task.name, "address": task.address}
