"""All limits of the resources that a stranger can take from a rank.

A stranger is a caller that has not proved to be a rank. docs/security.md lists these numbers.
"""

from __future__ import annotations

from hostopt.options import Options

# Time for the handshake of a connection. gRPC keeps a connection that is not HTTP/2 for so long,
# even if it has ended.
HANDSHAKE_S = 5.0
# Time that a connection may be open without a call of a rank.
STRANGER_S = 10.0
# A rank scans for connections of strangers at this interval, or at once if so many descriptors
# are new.
SCAN_EVERY_S = 0.2
BURST = 32
_MOST_NEW_PER_S = 50_000  # connections that one machine can open
_STRANGERS = 64
CONNECTIONS_OF_A_PEER = 4  # two, and two more that are broken or new
# Concurrent calls on one connection; the caller queues further ones.
CALLS_OF_A_CONNECTION = 100
# Requests of unknown callers that are read at the same time, in a ring without token.
UNKNOWN_REQUESTS = 4
READ_S = 2.0
HEADER_BYTES, MOST_HEADER_BYTES = 8 << 10, 16 << 10
HEADROOM_BYTES = 64 << 10
_NOTE_BYTES, _NOTE_BYTES_OF_A_RANK = 64 << 10, 1 << 10
NOTE_DEPTH = 8
# The details of one rank, and the least time between two rounds of questions for observers.
DETAILS_BYTES = 4 << 10
OBSERVE_EVERY_S = 0.2
# Number of hosts that warnings name, and length of the texts that messages quote.
SHOWN_STRANGERS = 20
SHOWN_CHARACTERS = 200
SHOWN_DIFFERENCES = 4


def pause_s(descriptors: int) -> float:
    """Returns the time between two checks; no burst can take all descriptors within it."""
    return min(SCAN_EVERY_S, max(descriptors / _MOST_NEW_PER_S, 0.01))


def most_strangers(size: int) -> int:
    """Returns the maximum number of connections that are not known to be a peer's."""
    return _STRANGERS + 2 * size


def most_connections(size: int, descriptors: int) -> int:
    """Returns the maximum number of connections; half of the descriptors are for other files."""
    return max(2 * most_strangers(size) + CONNECTIONS_OF_A_PEER * size, descriptors // 2)


def most_message_bytes(options: Options) -> int:
    """Returns the maximum size of a message of any kind."""
    return options.segment_bytes + HEADROOM_BYTES


def most_overview_bytes(size: int) -> int:
    """Returns the maximum size of the answer to an observer."""
    return _NOTE_BYTES + (DETAILS_BYTES + _NOTE_BYTES_OF_A_RANK) * size


def most_note_bytes(size: int) -> int:
    """Returns the maximum size of a JSON message; a Hello message lists all ranks."""
    return _NOTE_BYTES + _NOTE_BYTES_OF_A_RANK * size
