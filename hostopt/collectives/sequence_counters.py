"""Synchronization of the ranks of one host through counters in shared memory.

Each rank writes to its own cache line and reads those of the others. Stores are plain, 8 bytes,
and follow the data: x86-64, which `collectives.hosts` checks, keeps their order.
"""

from __future__ import annotations

import os
import threading

import numpy as np

from hostopt.collectives import futex
from hostopt.collectives.call import CollectiveCall
from hostopt.errors import HostOptError
from hostopt.transport import event_loop
from hostopt.transport.base import Transport

_LINE_BYTES = 128  # two cache lines, which processors fetch together
_LINE_WORDS = _LINE_BYTES // 8
_PAGE_BYTES = 4096

# Positions in the line of a rank. A rank may be ahead of another by one barrier or one word. So
# that it never overwrites what the other has yet to read, words and signatures alternate between
# two positions, flags are followed by a barrier, and _FINITE is written after the first barrier of
# a call.
_BARRIER = 0  # number of barriers that the rank has reached
_FLAGS = 1
_WORD = 2  # 2 words, then their step numbers, counted from 1
_WORD_STEP = 4
_SIGNATURE = 6  # 2 checksums
_FINITE = 8

_SPINS = 40_000  # polls before the thread sleeps, about 2 ms
_LONGEST_SLEEP_S = 1e-3  # between looks at errors and deadlines
_spinning = threading.Lock()  # a spinning thread holds the interpreter lock: allow only one


def counters_bytes(count: int) -> int:
    """Returns the size of the counters of `count` ranks, a multiple of the page size."""
    return -(-count * _LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


class SequenceCounters:
    """Barriers and 64-bit words of the ranks of one host, in memory that is initially zero."""

    def __init__(self, memory: memoryview, members: tuple[int, ...], transport: Transport) -> None:
        self._transport = transport
        self._words = memory[: counters_bytes(len(members))].cast("Q")
        self._address = np.frombuffer(self._words, np.uint8).ctypes.data
        self._lines = range(0, len(members) * _LINE_WORDS, _LINE_WORDS)
        self._line = self._lines[members.index(transport.rank)]
        self._peers = [
            (line, rank) for line, rank in zip(self._lines, members) if rank != transport.rank
        ]
        # With fewer cores than ranks, a spinning rank would delay the one that it waits for.
        self._spins = _SPINS if len(members) <= len(os.sched_getaffinity(0)) else 1
        self._barriers = 0
        self._calls = 0
        self._is_unchecked = False  # the signature of the last call

    def barrier(self, call: CollectiveCall, round_: int) -> None:
        """Waits until all ranks of this host have reached barrier `round_` of the call.

        The first one after `begin_call` raises CollectiveMismatchError if the calls differ.
        """
        self._barriers += 1
        self._publish(_BARRIER, self._barriers)
        for line, rank in self._peers:
            self._wait(line + _BARRIER, self._barriers, rank, call, round_)
        if self._is_unchecked:
            self._is_unchecked = False
            position = _SIGNATURE + self._calls % 2
            local = self._words[self._line + position]
            for line, rank in self._peers:
                if self._words[line + position] != local:
                    raise event_loop.run(self._transport.abort_on_mismatch(rank, call.tag()))

    def begin_call(self, call: CollectiveCall, nbytes: int) -> None:
        """Publishes the signature of a call of `nbytes`, before its first barrier."""
        if self._transport.error is not None:
            raise self._transport.error
        tag = call.tag()
        self._transport.recorder.record("in memory", -1, call.name, tag, nbytes)
        self._calls += 1
        self._is_unchecked = True
        self._words[self._line + _SIGNATURE + self._calls % 2] = tag.signature

    def all_reduce_band(self, flags: int, call: CollectiveCall) -> int:
        """Returns the bits that are set on all ranks. The next call must contain a barrier."""
        self._words[self._line + _FLAGS] = flags
        self.barrier(call, 0)
        for line, _ in self._peers:
            flags &= self._words[line + _FLAGS]
        return flags

    def all_finite(self, finite: bool, call: CollectiveCall, round_: int) -> bool:
        """Tells if `finite` is True on all ranks, at the last barrier of a call."""
        self._words[self._line + _FINITE] = finite
        self.barrier(call, round_)
        return finite and all(self._words[line + _FINITE] for line, _ in self._peers)

    def write_word(self, step: int, word: int) -> None:
        """Publishes word number `step` of this rank, without waiting.

        All ranks must have passed a barrier or read the previous word before they write the next.
        """
        self._words[self._line + step % 2 + _WORD] = word
        self._publish(step % 2 + _WORD_STEP, step + 1)

    def read_words(self, call: CollectiveCall) -> list[int]:
        """Returns the words of all ranks for step `call.step`; waits until all are written."""
        position = call.step % 2
        for line, rank in self._peers:
            self._wait(line + position + _WORD_STEP, call.step + 1, rank, call, 0)
        return [self._words[line + position + _WORD] for line in self._lines]

    def _publish(self, position: int, value: int) -> None:
        """Writes a counter of this rank, and wakes the ranks that sleep until it changes."""
        self._words[self._line + position] = value
        futex.wake(self._address + 8 * (self._line + position))

    def _wait(
        self, position: int, value: int, rank: int, call: CollectiveCall, round_: int
    ) -> None:
        """Waits until a counter of a rank is at least `value`."""
        if self._words[position] >= value or self._spin(position, value):
            return

        def sleep() -> None:
            found = self._words[position]
            if found < value:
                futex.wait(self._address + 8 * position, found, _LONGEST_SLEEP_S)

        try:
            self._transport.mailbox.poll(
                rank,
                call.tag(round_),
                call.in_phase("exchange in memory"),
                lambda: self._words[position] >= value,
                sleep,
            )
        except HostOptError as error:
            if self._words[position] >= value:  # the peer left after it had written
                return
            self._transport.abort(error)
            raise

    def _spin(self, position: int, value: int) -> bool:
        """Polls a counter for about 2 ms, unless another thread of this process is spinning."""
        if not _spinning.acquire(blocking=False):
            return False
        try:
            words = self._words
            for _ in range(self._spins):
                if words[position] >= value:
                    break
            return words[position] >= value
        finally:
            _spinning.release()
