"""Values that each option accepts and refuses, in code and in environment variables."""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from hostopt.errors import ConfigError
from hostopt.options import MAX_COUNT, MAX_SEGMENT_BYTES, MAX_STREAMS, YEAR_S


class Values(NamedTuple):
    """Values of an option in code, and texts of its variable."""

    wanted: str  # pattern of what a refusal names
    accepted: list[Any]
    refused: list[Any]
    texts: Mapping[str, Any] = MappingProxyType({})  # with the values that they stand for
    refused_texts: Sequence[str] = ()


# --- what is refused --------------------------------------------------------------------------

HUGE = 10**5000  # Python does not print it
NAN, INF = float("nan"), float("inf")
NO_VALUES: list[Any] = [b"25", [1], {}, object(), (), np.array([1, 2]), 1j, float, HUGE, -HUGE]
OTHERS: list[Any] = [*NO_VALUES, np.float32(4), np.int64(4), decimal.Decimal(4)]
NO_COUNTS: list[Any] = [  # nor are 0 and None, for most options
    *(-1, 10**30, 1e308, -1e308, 1e-300, 5e-324, -0.0, YEAR_S * 1.001, NAN, INF, -INF),
    *(99999999999, 1 << 63, True, False, "25", "1", "", "\0", "nan", *OTHERS),
]
NO_NUMBERS = [0, None, *NO_COUNTS]
NO_CHOICES: list[Any] = [
    *(0, 1, 1.0, "", "\0", "AUTO", "DATA", "nccl", "int8", "crc", "x" * 10_000, *OTHERS)
]
NO_WORDS = ["1", True, *NO_CHOICES]
NO_FLAGS = [None, "1", "false", np.True_, *NO_CHOICES]
NO_PATHS: list[Any] = [0, 1.5, 3, True, "", "a\0b", "\ud800", b"trace", *OTHERS]
NO_DEVICES: list[Any] = [
    *("", "x", "\0", "/device:CPU:99999999999", "/device:CPU:-1", "localhost", "/job:worker"),
    *(3, b"/device:CPU:0", [], True),
]
NO_TEXTS = ["\0", "9" * 5000, "²", "-1", "1e999", "nan", "0x10", "x" * 9999]
NO_NUMBER_TEXTS = ["", "many", "inf", "25 MiB", *NO_TEXTS]


def refusal_of(value: Any, give: Callable[[Any], object], *errors: type[Exception]) -> str:
    """Returns the message of a refused value, which pytest prints if it is accepted."""
    with pytest.raises((ConfigError, *errors)) as caught:
        give(value)
    return str(caught.value)


def check_refusal(
    text: str, value: str, wanted: str = "", remedy: str = "Correct it, or leave it"
) -> None:
    """Checks patterns of two sentences: the value and the expected one, and the remedy."""
    assert re.fullmatch(rf"{value}, wanted {wanted}.*\. {remedy} .*", text, re.DOTALL), text
    assert len(text) < 500


# --- options of hostopt -----------------------------------------------------------------------


def number(*accepted: Any) -> Values:
    texts = {"0.5": 0.5, "2": 2}
    return Values("a number from", [*accepted], NO_NUMBERS, texts, ["0", *NO_NUMBER_TEXTS])


def whole(*accepted: int) -> Values:
    zero = [] if 0 in accepted else [0]
    refused, texts = [*zero, None, 1.5, *NO_COUNTS], {str(value): value for value in accepted}
    refused_texts = [*map(str, zero), "1.5", *NO_NUMBER_TEXTS]
    return Values("a whole number from", [*accepted], refused, texts, refused_texts)


def choice(*accepted: Any, refused: list[Any] = NO_CHOICES) -> Values:
    texts = {"none" if value is None else str(value): value for value in accepted}
    return Values("one of ", [*accepted], refused, texts, NO_TEXTS)


def path(*accepted: Any, refused: list[Any] = NO_PATHS) -> Values:
    texts = {text: text for text in ("trace", "true", "false", "1", "0", *NO_TEXTS[1:])}
    return Values("(None or a path|the name of a file)", [None, *accepted], refused, texts, ["\0"])


SECONDS = number(0.001, YEAR_S, 10, np.float64(10))
FLAG_TEXTS = {"true": True, "1": True, "false": False, "0": False}
FLAG = Values("(one of True, False|True or False)", [True, False], NO_FLAGS, FLAG_TEXTS, NO_TEXTS)
TIMELINE = path(
    *("trace.json", "..", "no/such/directory/trace", Path("trace"), "é" * 90),
    refused=["/", ".", *NO_PATHS],
)
OPTIONS = {
    "bucket_mb": number(1 / 8192, 1 << 20, 3, np.float64(2)),
    "segment_bytes": whole(0, 3, MAX_SEGMENT_BYTES),
    "streams": whole(0, 3, MAX_STREAMS),
    "interfaces": Values(
        "None or up to 16 names",
        [None, "eth0", "eth0,eth1"],
        [*NO_PATHS, "eth 0", "eth0,", ",".join(["eth0"] * 17)],
        {"lo": "lo", "ib0,ib1": "ib0,ib1", "none": None},
        ["true", "eth0, eth1", ","],
    ),
    "rendezvous_timeout_s": SECONDS,
    "stall_warning_s": SECONDS,
    "collective_timeout_s": SECONDS,
    "communication": choice(np.str_("grpc"), "grpc", "auto", "shm", refused=[None, *NO_CHOICES]),
    "compression": choice("bf16", "fp16", None),
    "timeline": TIMELINE,
    "checksum": choice(True, False, None)._replace(texts=FLAG_TEXTS),
    "nonfinite": choice("skip", "error", "warn", refused=[None, *NO_CHOICES]),
    "desync_check_steps": whole(0, 1, MAX_COUNT),
    "debug_dir": path("debug", Path("debug"), "é"),
    "token_file": path("token", Path("token")),
    "tls_dir": path(),
    "insecure": FLAG,
    "restore_previous": FLAG,
    "evaluator_timeout_s": SECONDS,
    "autotune": FLAG,
    "shard_optimizer": choice(True, False, None)._replace(texts=FLAG_TEXTS),
}

# --- options of estimator_ext, by the class that takes them -----------------------------------

COUNT = Values("a whole number above 0", [1, MAX_COUNT], [1.0, MAX_COUNT + 1, *NO_NUMBERS])
COUNT_OR_NONE = COUNT._replace(
    accepted=[None, 1, MAX_COUNT], refused=[0, 1.0, MAX_COUNT + 1, *NO_COUNTS]
)
SCALE = Values(
    "a number that float32 holds",
    [2.0**-126, 3e38, 1, np.float32(2)],
    [0, -1, NAN, INF, 1e308, 1e-300, True, None, "1", *NO_VALUES],
)
GROWTH_STEPS = Values(
    "a whole number from 0",
    [0, MAX_COUNT, np.int64(2)],
    [-1, 1.5, True, MAX_COUNT + 1, None, "1", *NO_VALUES],
)
DEVICE = Values(
    "the name of a device",
    [None, "/device:CPU:0", "/cpu:0", "/device:GPU:1023"],
    NO_DEVICES,
)
ESTIMATOR_OPTIONS = {
    "HostOffloadStrategy": {
        "accelerator": DEVICE,
        "variables_on_host": FLAG,
        "sparse_as_dense": FLAG,
        "auto_shard": Values("None or one of", [None, "data", "file", "off"], NO_WORDS),
        "collective_timeout_s": SECONDS,
    },
    "RunConfig": {
        "accumulate_steps": COUNT,
        "iterations_per_loop": COUNT,
        "prefetch_depth": COUNT_OR_NONE,
        "uneven_data": Values("one of ", ["join", "stop"], [None, *NO_WORDS]),
        "resume_data": Values("one of ", ["state", "skip"], [None, *NO_WORDS]),
        "strict": FLAG,
        "timeline": TIMELINE,
    },
    "Estimator": dict.fromkeys(
        ["train_batch_size", "eval_batch_size", "predict_batch_size"], COUNT_OR_NONE
    ),
    "LossScaleOptimizer": {"scale": SCALE, "growth_steps": GROWTH_STEPS},
}
