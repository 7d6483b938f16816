"""Options: defaults, environment variables and refused values."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

from hostopt.errors import ConfigError
from hostopt.options import Options

NAMES = [field.name for field in dataclasses.fields(Options) if "float" in field.type]
NAMES.append("segment_bytes")


def test_defaults() -> None:
    assert dataclasses.asdict(Options()) == {
        "bucket_mb": 25.0,
        "segment_bytes": 2 << 20,
        "rendezvous_timeout_s": 300.0,
        "stall_warning_s": 30.0,
        "collective_timeout_s": 300.0,
        "communication": "auto",
        "compression": None,
        "timeline": None,
        "checksum": None,
        "nonfinite": "error",
        "desync_check_steps": 1000,
        "debug_dir": None,
        "token_file": None,
        "tls_dir": None,
        "insecure": False,
        "restore_previous": False,
        "evaluator_timeout_s": 3600.0,
        "autotune": False,
    }
    assert Options().bucket_bytes == 25 * 1024 * 1024


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().bucket_mb = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bucket_mb", "bucket_bytes"), [(1 / 8192, 128), (3 / 8192, 384), (0.5, 1 << 19), (7, 7 << 20)]
)
def test_bucket_bytes(bucket_mb: float, bucket_bytes: int) -> None:
    assert Options(bucket_mb=bucket_mb).bucket_bytes == bucket_bytes


@pytest.mark.parametrize("bucket_mb", [0.1, 25.00001])
def test_bucket_mb_is_a_multiple_of_128_bytes(bucket_mb: float) -> None:
    with pytest.raises(ConfigError, match=r"bucket_mb.*multiple of 128 bytes") as caught:
        Options(bucket_mb=bucket_mb)
    result = re.search(r"such as ([\d.e-]+)\. Correct", str(caught.value))
    assert result is not None
    assert Options(bucket_mb=float(result[1])).bucket_bytes == round(bucket_mb * 8192) * 128


def test_the_environment_overrides() -> None:
    environ = {
        "HOSTOPT_BUCKET_MB": "0.5",
        "HOSTOPT_SEGMENT_BYTES": "4096",
        "HOSTOPT_RENDEZVOUS_TIMEOUT_S": "1.5",
        "HOSTOPT_STALL_WARNING_S": "2",
        "HOSTOPT_COLLECTIVE_TIMEOUT_S": "3",
        "HOSTOPT_COMMUNICATION": "grpc",
        "HOSTOPT_COMPRESSION": "bf16",
        "HOSTOPT_TIMELINE": "trace.json",
        "HOSTOPT_CHECKSUM": "true",
        "HOSTOPT_NONFINITE": "skip",
        "HOSTOPT_DESYNC_CHECK_STEPS": "0",
        "HOSTOPT_DEBUG_DIR": "debug",
        "HOSTOPT_TOKEN_FILE": "token",
        "HOSTOPT_TLS_DIR": "tls",
        "HOSTOPT_INSECURE": "1",
        "HOSTOPT_RESTORE_PREVIOUS": "true",
        "HOSTOPT_EVALUATOR_TIMEOUT_S": "4",
        "HOSTOPT_AUTOTUNE": "true",
        "HOSTOPT_OF_ANOTHER_KIND": "x",
    }
    result = Options(bucket_mb=4, stall_warning_s=9).with_environment(environ)
    numbers = (0.5, 4096, 1.5, 2.0, 3.0)
    wire = ("grpc", "bf16", "trace.json", True)
    others = ("skip", 0, "debug", "token", "tls", True, True, 4.0, True)
    assert result == Options(*numbers, *wire, *others)
    assert isinstance(result.segment_bytes, int)


def test_options_without_an_environment_variable_are_unchanged() -> None:
    assert Options(bucket_mb=4).with_environment({}) == Options(bucket_mb=4)
    assert Options().with_environment({"HOSTOPT_LOG": "1"}) == Options()  # somebody else's
    assert Options(bucket_mb=4).with_environment({"HOSTOPT_STALL_WARNING_S": "1"}) == Options(
        bucket_mb=4, stall_warning_s=1
    )


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTOPT_STALL_WARNING_S", "17")
    assert Options().with_environment().stall_warning_s == 17
    monkeypatch.setattr(os, "environ", {"HOSTOPT_STALL_WARNING_S": "18"})
    assert Options().with_environment().stall_warning_s == 18


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "25", None, [1]])
def test_bad_values(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Options(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "many", "0", "-1", "nan", "inf", "1e999", "25 MiB"])
def test_bad_values_in_the_environment(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){name}"):
        Options().with_environment({f"HOSTOPT_{name.upper()}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("communication", "nccl"),
        ("communication", None),
        ("compression", "int8"),
        ("checksum", "crc"),
        ("nonfinite", None),
    ],
)
def test_bad_choices(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}, wanted one of"):
        Options(**{name: value})  # type: ignore[arg-type]


def test_the_environment_can_disable_compression() -> None:
    asked = Options(compression="fp16")
    assert asked.with_environment({"HOSTOPT_COMPRESSION": "none"}).compression is None


def test_segments_have_whole_bytes() -> None:
    with pytest.raises(ConfigError, match="segment_bytes"):
        Options(segment_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"(?i)segment_bytes"):
        Options().with_environment({"HOSTOPT_SEGMENT_BYTES": "1.5"})


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "1"])
def test_desync_check_steps_is_a_whole_number(value: object) -> None:
    assert Options(desync_check_steps=0).desync_check_steps == 0
    with pytest.raises(ConfigError, match="desync_check_steps"):
        Options(desync_check_steps=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["HOSTOPT_AUTOTUN", "HOSTOPT_BUKET_MB", "HOSTOPT_TLSDIR"])
def test_a_misspelt_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"hostopt does not read {name}.*did you mean HOSTOPT_"):
        Options().with_environment({name: "1"})
