"""How bytes get from one rank to another."""

from __future__ import annotations

import os

# Read when grpc is imported. With gRPC's handlers around fork(), a child of subprocess can abort
# before it has become another program (seen on Python 3.9); no child of a rank uses its gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
