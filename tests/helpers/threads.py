"""Calls in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


def in_threads(fn: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Calls `fn` as `map` does, each time in a thread, started in this order; waits for all."""
    threads = [threading.Thread(target=fn, args=each) for each in zip(*arguments)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
