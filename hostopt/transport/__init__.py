"""Transports: tagged messages between ranks."""

from __future__ import annotations

import os

# gRPC reads this when it is imported. Its fork() handlers can abort a child of `subprocess` before
# exec() (seen on Python 3.9), and no child of a rank uses its parent's gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
