"""Calls of strangers to the gRPC server of a rank."""

from __future__ import annotations

from typing import Any

import grpc


def call(address: str, method: str, *messages: bytes, **metadata: str) -> Any:
    """Calls a rank like a stranger; returns the error.

    Args:
      address: address of the rank.
      method: ``Stream``, which takes any number of messages, or one that takes one.
      *messages: what is sent.
      **metadata: of the call.
    """
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        path = f"/hostopt.Ring/{method}"
        given = {"metadata": tuple(metadata.items()), "timeout": 30}
        if method == "Stream":
            return channel.stream_unary(path).future(iter(messages), **given).exception()
        return channel.unary_unary(path).future(*messages, **given).exception()
