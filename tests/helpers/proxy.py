"""A TCP proxy in front of a rank, which causes one fault."""

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
# 64 equal words of eight bytes that are not zero: payload, and no header
_DATA = re.compile(rb"((?!\x00{8}).{8})\1{63}", re.DOTALL)


class Proxy:
    """Forwards all connections to an address; a context manager.

    Args:
      target: address that the rank listens at.
      action: the fault. ``delay`` delays each block by 5 ms. The other faults happen once, in the
        middle of a message: ``pause`` stops all data for 1.5 s, ``reset`` ends the connection
        with RST, ``truncate`` closes it after a part of the message, ``flip`` flips one bit.
      after_bytes: number of bytes that are forwarded before the fault.
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
        server.close()  # asyncio.run cancels the open connections

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
        except OSError:  # the rank does not listen yet, or has ended
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
                if data is not None and self._is_due(len(block)):
                    block = await self._apply_fault(block, data.start(), ends)
                writer.write(block)
                await writer.drain()
                if self.acted and self._action == "truncate":
                    return

    def _is_due(self, nbytes: int) -> bool:
        self._left_bytes -= nbytes
        return self._left_bytes <= 0 and (not self.acted or self._action == "delay")

    async def _apply_fault(
        self, block: bytes, start: int, ends: list[asyncio.StreamWriter]
    ) -> bytes:
        self.acted = True
        if self._action == "reset":
            for end in ends:
                _reset(end)
        elif self._action == "truncate":
            return block[: start + 100]
        elif self._action == "flip":
            return _flip_bit(block, start)
        else:
            await asyncio.sleep({"delay": _DELAY_S, "pause": _PAUSE_S}[self._action])
        return block


def _reset(end: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.transport.abort()


def _flip_bit(block: bytes, start: int) -> bytes:
    """Flips a high bit in the first nonzero byte of the repeated word at `start`."""
    index = next(i for i in range(start + 256, start + 264) if block[i])
    return block[:index] + bytes([block[index] ^ 0x40]) + block[index + 1 :]
