"""What a stranger can take of a rank: the bounds of connections, time and memory, all of them.

Who has not shown to be a rank is a stranger: see SECURITY.md, which has these numbers as a table.
"""

from __future__ import annotations

from hostopt.options import Options

__all__: list[str] = []

# How long a connection may take for its handshake, and how long it may be there without a call
# that shows whose it is. gRPC keeps what is no HTTP/2 for the first, even where it has ended.
HANDSHAKE_S = 5.0
STRANGER_S = 10.0
# How often a rank looks for connections of strangers, and how many new descriptors have it look
# at once.
LOOK_EVERY_S = 0.2
BURST = 32
_MOST_NEW_PER_S = 50_000  # connections, on one machine
_STRANGERS = 64
CONNECTIONS_OF_A_PEER = 4  # two, and as many that have broken or begin anew
# Calls at the same time on one connection; more wait at the caller.
CALLS_OF_A_CONNECTION = 100
# Requests that are read at the same time without knowing from whom, in a ring without token.
UNKNOWN_REQUESTS = 4
READ_S = 2.0
HEADER_BYTES, MOST_HEADER_BYTES = 8 << 10, 16 << 10
HEADROOM_BYTES = 64 << 10
_NOTE_BYTES, _NOTE_BYTES_OF_A_RANK = 64 << 10, 1 << 10
NOTE_DEPTH = 8
# Callers of which a warning tells, and how much of what they claim.
SHOWN_STRANGERS = 20
SHOWN_CHARACTERS = 200
SHOWN_DIFFERENCES = 4


def pause_s(descriptors: int) -> float:
    """How long a rank may close its eyes: until then a burst cannot take all descriptors.

    Args:
      descriptors: how many this process may have.
    """
    return min(LOOK_EVERY_S, max(descriptors / _MOST_NEW_PER_S, 0.01))


def most_strangers(size: int) -> int:
    """How many connections may be there that nobody has shown to be a peer's.

    Args:
      size: number of ranks, which may all connect at the same time.
    """
    return _STRANGERS + 2 * size


def most_connections(size: int, descriptors: int) -> int:
    """How many connections may be there in all; what is between the two is room for peers.

    Args:
      size: number of ranks.
      descriptors: how many this process may have, of which half is for other files.
    """
    return max(2 * most_strangers(size) + CONNECTIONS_OF_A_PEER * size, descriptors // 2)


def most_message_bytes(options: Options) -> int:
    """The longest message, whatever it is.

    Args:
      options: `segment_bytes` bounds the frames.
    """
    return options.segment_bytes + HEADROOM_BYTES


def most_note_bytes(size: int) -> int:
    """The longest note in JSON, which a rank reads.

    Args:
      size: number of ranks, which a Hello names.
    """
    return _NOTE_BYTES + _NOTE_BYTES_OF_A_RANK * size
