"""Messages over gRPC: one stream of frames to each rank that this one sends to.

A rank is at once a server, at its own address, and a client of its peers. The methods carry raw
bytes (generic handlers without serializers), so nothing but frames and small JSON notes travels:

    Hello    JSON, both ways: who are you, and do you know the same ring?
    Stream   frames, one way; ends in good order when the sender leaves
    Leave    JSON: I go now, because of this error, or with none

All of it runs on the loop; what users and other threads call hands work over to it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import json
import logging
import os
import threading
import time
import traceback
import uuid
from typing import Any

from hostopt.cluster import Cluster
from hostopt.errors import (
    CollectiveTimeoutError,
    ConfigError,
    HostOptError,
    PeerLostError,
    RendezvousTimeoutError,
    error_from_dict,
    error_to_dict,
)
from hostopt.options import Options
from hostopt.transport import event_loop, frame
from hostopt.transport.allocator import keep_freed_memory
from hostopt.transport.base import Payload, Tag, Transport
from hostopt.transport.grpc_import import grpc
from hostopt.transport.grpc_parts import (
    END_OF_STREAM,
    GOODBYE_TIMEOUT_S,
    Stream,
    channel_options,
    listen_address,
)

__all__: list[str] = []

_log = logging.getLogger(__name__)

_SERVICE = "hostopt.Ring"
_PROGRESS_EVERY_S = 10.0
_HELLO_TIMEOUT_S = 1.0
_AGAIN_AFTER_S = 0.05
# How long a word of the peer may take that says why its connection broke, or that of another rank.
_LAST_WORD_TIMEOUT_S = 0.5


class GrpcTransport(Transport):
    """One rank of a ring over gRPC; listens, finds all peers, then sends and receives.

    Args:
      cluster: the ring and this rank's place in it.
      options: deadlines and sizes.

    Raises:
      ConfigError: the own address is in use, or a peer knows another ring.
      RendezvousTimeoutError: a rank did not appear in time; the message names it.
    """

    def __init__(self, cluster: Cluster, options: Options) -> None:
        super().__init__(cluster, options)
        keep_freed_memory()
        self._successor = (self.rank + 1) % self.size
        self._missing = {peer for peer in range(self.size) if peer != self.rank}
        # a rank that was started again, or meets again, is another one to those that knew it
        self._incarnation = uuid.uuid4().hex
        self._incarnations: dict[int, str] = {}  # of the peers that this rank has met
        self._streams: dict[int, Stream] = {}
        self._ending = threading.RLock()  # held while the ring is failed or closed
        self._closed = False
        self._pid = os.getpid()
        # to peers, of the error that ended the ring
        self._notes: list[concurrent.futures.Future[None]] = []
        self._gone: set[int] = set()  # peers that have left, or whose connection broke
        self._to_peer: dict[int, grpc.aio.Channel] = {}
        self._server: grpc.aio.Server | None = None
        event_loop.run(self._serve())
        atexit.register(self.close)
        try:
            event_loop.run(self._rendezvous())
        except BaseException as error:
            self.abort(error)
            self.close()
            raise

    # -- sending ---------------------------------------------------------------------------

    async def send(self, peer: int, tag: Tag, payload: Payload, what: str = "") -> None:
        """See `Transport.send`."""
        if self.error is not None:
            raise self.error
        facts = {**self._facts(peer), "step": tag.step, "bucket": tag.bucket}
        stream = self._stream(peer)
        self._count(len(payload), frame.HEADER_BYTES)
        if await stream.put(frame.encode(tag, payload)):
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
            )
        self.abort(error)
        raise self.error or error

    def _stream(self, peer: int) -> Stream:
        if peer not in self._streams:
            method = self._to_peer[peer].stream_unary(f"/{_SERVICE}/Stream")
            metadata = ("rank", str(self.rank)), ("to", self._incarnations.get(peer, ""))
            self._streams[peer] = Stream(
                method, metadata, self.options, lambda why: self._lost(peer, why)
            )
        return self._streams[peer]

    async def _lost(self, peer: int, why: str) -> None:
        """The connection to a peer broke, which is no news where the peer says goodbye."""
        if self._closed or self.mailbox.has_left(peer):
            return
        self._gone.add(peer)
        await asyncio.sleep(_LAST_WORD_TIMEOUT_S)
        if self._closed or self.mailbox.has_left(peer):
            return
        facts, meanwhile = self._facts(peer), ""
        wait = self.mailbox.current_wait()
        if wait is not None:
            tag, what = wait
            facts |= {"step": tag.step, "bucket": tag.bucket}
            meanwhile = f" while it waited for {what or 'data'} at {tag}"
        self.abort(
            PeerLostError(
                f"{self._name(peer)} lost: rank {self.rank} ({self.cluster.task}) found its "
                f"connection broken{meanwhile} ({why}); its process is gone or its host is "
                "silent. Look at the output of that rank, then run the same command again",
                **facts,
                root_cause=f"connection to rank {peer} broken",
            )
        )

    # -- receiving -------------------------------------------------------------------------

    async def _serve(self) -> None:
        task, options = self.cluster.ring[self.rank], channel_options(self.options)
        self._to_peer = {
            peer: grpc.aio.insecure_channel(self.cluster.ring[peer].address, options)
            for peer in self._missing
        }
        self._server = grpc.aio.server(options=options)
        handlers = {
            "Hello": grpc.unary_unary_rpc_method_handler(self._on_hello),
            "Stream": grpc.stream_unary_rpc_method_handler(self._on_stream),
            "Leave": grpc.unary_unary_rpc_method_handler(self._on_leave),
        }
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_SERVICE, handlers)]
        )
        try:
            bound = self._server.add_insecure_port(listen_address(task.address))
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(
                f"address {task.address} of this task ({task.name}) is in use or not of this "
                "machine. End the process that listens there (is this task already running?) or "
                "choose another port in TF_CONFIG on all ranks",
                **self._facts(self.rank),
            )
        await self._server.start()

    async def _on_stream(self, _: Any, context: grpc.aio.ServicerContext) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        claim = metadata.get("rank", "")
        if metadata.get("to") != self._incarnation:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this rank is of another ring")
        if not claim.isdigit() or int(claim) not in self._to_peer:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"{claim!r} is no peer of this rank"
            )
        peer, why = int(claim), "connection reset"
        try:
            await context.send_initial_metadata(())  # the peer waits for it
            while (message := await context.read()) is not grpc.aio.EOF:
                if message == END_OF_STREAM:
                    self.mailbox.leave(peer, "it has closed its communicator")
                else:
                    self.mailbox.put(peer, *frame.decode(message))
        except HostOptError as error:
            self.abort(error)
        except (Exception, asyncio.CancelledError) as error:  # how a connection breaks
            why = str(error) or why
        # not lost where END_OF_STREAM was the last message; gRPC may well cancel this call now
        await asyncio.shield(self._lost(peer, why))
        return b""

    # -- beginning -------------------------------------------------------------------------

    def _hello(self) -> dict[str, Any]:
        ring = [str(task) for task in self.cluster.ring]
        return {
            "version": frame.WIRE_VERSION,
            "rank": self.rank,
            "incarnation": self._incarnation,
            "ring": ring,
            "segment_bytes": self.options.segment_bytes,
            "timeline": self.options.timeline is not None,  # the ranks compare their clocks
            "communication": self.options.communication,
            "compression": self.options.compression,
            "nonfinite": self.options.nonfinite,
            "desync_check_steps": self.options.desync_check_steps,
        }

    async def _on_hello(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        theirs = json.loads(request)
        peer = theirs["rank"]
        if peer in self._missing:  # later callers are strangers; the answer tells them
            try:
                self._check_hello(peer, theirs)
            except ConfigError as error:
                self.abort(error)
            self._incarnations[peer] = theirs.get("incarnation", "")
            if peer != self._successor:  # to the successor a connection is needed, not a call
                self._missing.discard(peer)
        return json.dumps({**self._hello(), "met": self._incarnations.get(peer, "")}).encode()

    def _check_hello(self, peer: int, hello: dict[str, Any]) -> None:
        hello = {key: value for key, value in hello.items() if key not in ("incarnation", "met")}
        wanted = {**self._hello(), "rank": peer}
        del wanted["incarnation"]
        if hello != wanted:
            raise ConfigError(
                f"at {self._name(peer)} rank {self.rank} found {json.dumps(hello)}, wanted "
                f'{json.dumps(wanted)}. Give all ranks the same "cluster" in TF_CONFIG, the '
                "same options and the same version of hostopt",
                **self._facts(peer),
            )

    async def _rendezvous(self) -> None:
        """Say hello to every peer until all have answered, or have called themselves."""
        started = time.monotonic()
        report_at_s = _PROGRESS_EVERY_S
        while self._missing and self.error is None:
            await asyncio.gather(*map(self._greet, self._missing))
            waited_s = time.monotonic() - started
            tasks = [self.cluster.ring[peer] for peer in sorted(self._missing)]
            names = ", ".join(f"{task.name} ({task.address})" for task in tasks)
            if names and waited_s >= self.options.rendezvous_timeout_s:
                raise RendezvousTimeoutError(
                    f"{self._name(self.rank)} has waited {waited_s:.0f} s, missing: {names}. "
                    "Start them, or correct their addresses in TF_CONFIG",
                    **self._facts(self.cluster.ring.index(tasks[0])),
                )
            if names and waited_s >= report_at_s:
                _log.warning("rank %d has waited %.0f s, missing: %s", self.rank, waited_s, names)
                report_at_s += _PROGRESS_EVERY_S
        if self.error is not None:
            raise self.error

    async def _greet(self, peer: int) -> None:
        hello = self._to_peer[peer].unary_unary(f"/{_SERVICE}/Hello")
        timeout_s = min(_HELLO_TIMEOUT_S, self.options.rendezvous_timeout_s)
        try:
            answer = await hello(
                json.dumps(self._hello()).encode(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError:
            answer = b""
        if self.mailbox.has_left(peer):
            self._missing.discard(peer)
        if not answer or peer not in self._missing:
            return
        hello = json.loads(answer)
        self._check_hello(peer, hello)
        if hello["met"] != self._incarnation:  # it is in an earlier ring still
            await asyncio.sleep(_AGAIN_AFTER_S)
            return
        self._incarnations[peer] = hello["incarnation"]
        if peer != self._successor or await self._stream(peer).opened(timeout_s):
            self._missing.discard(peer)

    # -- end -------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """See `Transport.abort`."""
        if not isinstance(error, HostOptError):
            cause = "".join(traceback.format_exception_only(type(error), error)).strip()
            error = PeerLostError(
                f"{self._name(self.rank)} stopped with an error. Root cause: {cause}",
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
            if self.error is not None:  # before any stream breaks, and relayed where it came in
                self._tell_all(self.error)
        atexit.unregister(self.close)
        event_loop.run(self._end())

    async def _end(self) -> None:
        streams = list(self._streams.values())
        if self.error is None:
            await asyncio.gather(*(stream.flush() for stream in streams))
            await asyncio.gather(*map(self._leave, self._to_peer.keys() - self._gone))
        if self._notes:
            notes = [asyncio.wrap_future(note) for note in self._notes]
            await asyncio.wait(notes, timeout=GOODBYE_TIMEOUT_S)
        for stream in streams:
            stream.cancel()
        for channel in self._to_peer.values():
            await channel.close()
        if self._server is not None:  # peers end their streams when they are told
            stopped = self._server.stop(GOODBYE_TIMEOUT_S if self.error is None else 0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped, 2 * GOODBYE_TIMEOUT_S)

    def _tell_all(self, error: HostOptError) -> None:
        """Start to tell the peers why this rank ends."""
        for peer in self._to_peer.keys() - self._gone:
            self._notes.append(event_loop.start(self._leave(peer, error_to_dict(error))))

    async def _leave(self, peer: int, error: dict[str, Any] | None = None) -> None:
        note: dict[str, Any] = {"sender": self.rank, "to": self._incarnations.get(peer)}
        if error:
            note["error"] = error
        leave = self._to_peer[peer].unary_unary(f"/{_SERVICE}/Leave")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await leave(
                json.dumps(note, default=str).encode(),
                timeout=GOODBYE_TIMEOUT_S,
                wait_for_ready=True,
            )

    async def _on_leave(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        note = json.loads(request)
        # without an incarnation it comes from a rendezvous that has failed
        if note["to"] not in (None, self._incarnation):
            return b""
        if "error" in note:
            with self._ending:
                self.mailbox.fail(error_from_dict(note["error"]))
            return b""
        sender = note["sender"]
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
