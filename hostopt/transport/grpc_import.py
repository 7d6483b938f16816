"""gRPC, imported so that it polls its sockets in the thread that awaits them, where it can.

By default newer releases have a pool of threads for that, which hand each message on: twice as
many changes of context, and 15 % more processor time. gRPC reads the variable while it is
imported. What the user has set holds, and so does a gRPC that the program imported earlier.

gRPC's core logs nothing of its own, such as each GOAWAY of a connection that ends: whatever
breaks becomes a typed error here. It reads that variable when it is first used, in old releases.
"""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"
_SET = _VARIABLE in os.environ
if not _SET:
    os.environ[_VARIABLE] = (
        "-event_engine_client,-event_engine_listener,tcp_rcv_lowat,tcp_frame_size_tuning"
    )
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc as grpc  # noqa: E402, PLC0414  after the variable that it reads

if not _SET:
    del os.environ[_VARIABLE]

__all__: list[str] = []
