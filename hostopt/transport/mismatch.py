"""Ranks that make different calls: an error that says which rank calls what.

Two ranks of a ring may find it at the same time, each at its own predecessor. So whoever finds it
asks all ranks, and their texts are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hostopt.errors import CollectiveMismatchError, HostOptError, error_from_dict

if TYPE_CHECKING:
    from hostopt.transport.base import Transport

__all__: list[str] = []

_AGAIN_AFTER_S = 0.1  # for ranks that are about to make their call
_SHOWN_CALLS = 4


async def find_mismatch(transport: Transport, peer: int, tag: Sequence[int]) -> HostOptError:
    """Find out what the ranks call instead of one collective.

    Args:
      transport: this rank's transport, which asks the others.
      peer: a rank that makes another call than this one.
      tag: a message of this rank's call.

    Returns:
      The error; another rank's, if it has found one earlier.
    """
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    calls: dict[int, str] = {}
    for attempt in range(2):
        if attempt:
            await asyncio.sleep(_AGAIN_AFTER_S)
        asked = (transport.ask(each, transport.rank, tag) for each in peers)
        answers = dict(zip(peers, await asyncio.gather(*asked)))
        for answer in answers.values():
            if answer is not None and answer["error"]:
                return error_from_dict(answer["error"])
        own = transport.call_on(tag[0])
        calls = {
            rank: call["signature"]
            for rank, call in sorted([(transport.rank, own), *_calls(answers)])
            if call is not None and is_same_call(call, tag)
        }
        if len(calls) == transport.size:
            break
    calls.setdefault(peer, "another collective")
    return _error(transport, calls, tag)


def is_same_call(call: dict[str, Any], tag: Sequence[int]) -> bool:
    """Whether a call is at the same place in its channel as a message.

    Args:
      call: what `Transport.call_on` returned.
      tag: tag of the message.

    Returns:
      True if the two belong together, whatever their signatures.
    """
    return [call["step"], call["bucket"]] == list(tag[1:3])


def _calls(
    answers: dict[int, dict[str, Any] | None],
) -> list[tuple[int, dict[str, Any] | None]]:
    return [(rank, answer and answer.get("call")) for rank, answer in answers.items()]


def _error(
    transport: Transport, calls: dict[int, str], tag: Sequence[int]
) -> CollectiveMismatchError:
    tasks = transport.cluster.ring
    first = {text: rank for rank, text in sorted(calls.items(), reverse=True)}
    ranks = sorted(first.values())
    shown = [f"rank {rank} ({tasks[rank]}) calls {calls[rank]}" for rank in ranks[:_SHOWN_CALLS]]
    if len(ranks) > _SHOWN_CALLS:
        shown.append(f"and {len(ranks) - _SHOWN_CALLS} more calls differ")
    blamed = ranks[min(1, len(ranks) - 1)]
    return CollectiveMismatchError(
        f"{', '.join(shown)} at step {tag[1]}. Call the collectives in the same order with the "
        "same names, shapes and options on all ranks",
        rank=blamed,
        task=tasks[blamed].name,
        address=tasks[blamed].address,
        step=tag[1],
        bucket=tag[2],
    )
