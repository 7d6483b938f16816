"""Choice of the reducer for gradient buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.wire_format import WireFormat
from hostopt.gradients.bucket import Bucket
from hostopt.gradients.bucket_reducer import BucketReducer
from hostopt.gradients.fused_exchange import FusedExchange
from hostopt.gradients.inline_reducer import InlineReducer
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer

AnyReducer = Union[BucketReducer, FusedExchange]


def open_reducer(
    communicator: Communicator,
    buckets: Sequence[Bucket],
    check: NonFiniteCheck | None = None,
    wire_format: WireFormat | None = None,
) -> Reducer | InlineReducer:
    """Opens a reducer of gradient buckets on a new channel.

    Collective: all ranks must call it.

    Args:
      check: check of the sums; by default one with the option `nonfinite`.
      wire_format: format of float32 values between hosts; by default the one of the option
        `compression`.
    """
    check = check or NonFiniteCheck(communicator)
    if communicator.on_one_host:
        return InlineReducer(communicator, buckets, check)
    return Reducer(communicator, buckets, check, wire_format)
