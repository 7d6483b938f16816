"""A TCP proxy that stands before a rank and does harm to what passes, once."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading

_BLOCK_BYTES = 64 << 10
_STARTING_S = 10.0
_PAUSE_S = 1.5
_DELAY_S = 0.005
# 64 equal words of eight bytes, and not of zeros: data far inside a message, and no header
_DATA = re.compile(rb"((?!\x00{8}).{8})\1{63}", re.DOTALL)


class Proxy:
    """Forwards all connections to an address; a context manager.

    Args:
      target: where the rank listens.
      action: what happens to the data. ``delay``: each block comes 5 ms late. The others happen
        once, in the middle of a message. ``pause``: nothing passes for 1.5 s; ``reset``: the
        connection ends with RST; ``truncate``: it ends in good order, after a part of the
        message; ``flip``: one bit is another one.
      after_bytes: data that pass unharmed before.
    """

    def __init__(self, target: str, action: str, after_bytes: int = 1 << 20) -> None:
        self._target = target.rpartition(":")
        self._action = action
        self._left_bytes = after_bytes
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy")
        self.address = ""
        self.acted = False

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._started.wait(_STARTING_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._end.wait()
        server.close()  # and asyncio.run cancels what is still connected

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target
        ends = [writer]
        try:
            from_rank, to_rank = await asyncio.open_connection(host, int(port))
            ends.append(to_rank)
            ways = self._forward(reader, to_rank, ends), self._forward(from_rank, writer, ends)
            await asyncio.wait(
                [asyncio.ensure_future(way) for way in ways],
                return_when=asyncio.FIRST_COMPLETED,
            )
        except OSError:  # the rank does not listen yet, or no more
            pass
        finally:
            for end in ends:
                end.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: list[asyncio.StreamWriter],
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while block := await reader.read(_BLOCK_BYTES):
                data = _DATA.search(block)
                if data is not None and self._is_time(len(block)):
                    block = await self._harm(block, data.start(), ends)
                writer.write(block)
                await writer.drain()
                if self.acted and self._action == "truncate":
                    return

    def _is_time(self, nbytes: int) -> bool:
        self._left_bytes -= nbytes
        return self._left_bytes <= 0 and (not self.acted or self._action == "delay")

    async def _harm(self, block: bytes, start: int, ends: list[asyncio.StreamWriter]) -> bytes:
        self.acted = True
        if self._action == "reset":
            for end in ends:
                _reset(end)
        elif self._action == "truncate":
            return block[: start + 100]
        elif self._action == "flip":
            return _with_other_bit(block, start)
        else:
            await asyncio.sleep({"delay": _DELAY_S, "pause": _PAUSE_S}[self._action])
        return block


def _reset(end: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.transport.abort()


def _with_other_bit(block: bytes, start: int) -> bytes:
    """Flip a high bit of a word that begins at `start` and recurs, in its first byte not 0."""
    place = next(i for i in range(start + 256, start + 264) if block[i])
    return block[:place] + bytes([block[place] ^ 0x40]) + block[place + 1 :]
