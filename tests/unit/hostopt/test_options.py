"""Options: accepted and refused values in code and in the environment, and their page."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import DEADLINE_S, ROOT, deadline_s, jobs_of, reserved_addresses, task_of
from hypothesis import given
from hypothesis import strategies as st
from option_table import OPTIONS, OTHERS, check_refusal, refusal_of

from hostopt.cluster.cluster import Cluster
from hostopt.connect import connect_ring
from hostopt.errors import ConfigError, RetryableError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer
from hostopt.options import VARIABLES, Options, shown
from hostopt.transport.grpc.rendezvous import HelloMessages
from hostopt.transport.grpc.ring import Peers

DEFAULTS = dataclasses.asdict(Options())
VARIABLE_OF = {name: f"HOSTOPT_{name.upper()}" for name in DEFAULTS}


def test_the_table_has_every_option() -> None:
    assert OPTIONS.keys() == DEFAULTS.keys()


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().bucket_mb = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("bucket_mb", "bucket_bytes"),
    [(1 / 8192, 128), (3 / 8192, 384), (0.5, 1 << 19), (7, 7 << 20), (25.0, 25 << 20)],
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


# --- the environment --------------------------------------------------------------------------


def test_the_environment_overrides() -> None:
    given = {name: next(iter(values.texts.items())) for name, values in OPTIONS.items()}
    environ = {VARIABLE_OF[name]: text for name, (text, _) in given.items()}
    environ["HOSTOPT_OF_ANOTHER_KIND"] = "x"
    result = Options(bucket_mb=4, stall_warning_s=9).with_environment(environ)
    assert result == Options(**{name: value for name, (_, value) in given.items()})


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


@pytest.mark.parametrize("name", OPTIONS)
def test_each_text_of_a_variable_overrides(name: str) -> None:
    for text, value in OPTIONS[name].texts.items():
        for former in OPTIONS[name].accepted:
            result = Options(**{name: former}).with_environment({VARIABLE_OF[name]: text})
            assert getattr(result, name) == value
            assert type(getattr(result, name)) is type(value)


@pytest.mark.parametrize("name", ["HOSTOPT_AUTOTUN", "HOSTOPT_BUKET_MB", "HOSTOPT_TLSDIR"])
def test_a_misspelt_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"hostopt does not read {name}.*did you mean HOSTOPT_"):
        Options().with_environment({name: "1"})


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_refuses(name: str) -> None:
    for value in OPTIONS[name].refused:
        text = refusal_of(value, lambda v: Options(**{name: v}))
        check_refusal(text, f"option {name} is {re.escape(shown(value))}", OPTIONS[name].wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_variable_refuses(name: str) -> None:
    def give(text: str) -> Options:
        return Options().with_environment({VARIABLE_OF[name]: text})

    for text in OPTIONS[name].refused_texts:
        check_refusal(refusal_of(text, give), f"{VARIABLE_OF[name]} is .*", OPTIONS[name].wanted)


def taken(give: Callable[[], Options], label: str) -> Options | None:
    """Returns the options; None if they name the expected value."""
    try:
        options = give()
    except ConfigError as error:
        check_refusal(str(error), f"{label} is .*")
        return None
    assert options.with_environment({}) == options
    return options


NAMES = st.sampled_from(list(OPTIONS))
ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    st.sampled_from(["grpc", "fp16", "skip", 1e-300, 1e308, *OTHERS]),
    st.lists(st.integers()),
    st.builds(Path, st.text(st.characters(exclude_characters="\0"))),
    st.builds(np.float64, st.floats()),
)


@given(NAMES, ANYTHING)
def test_an_option_accepts_a_value_or_names_the_expected_one(name: str, value: Any) -> None:
    options = taken(lambda: Options(**{name: value}), f"option {name}")
    expected = os.fspath(value) if isinstance(value, Path) else value
    assert options is None or getattr(options, name) == expected


@given(NAMES, st.text() | st.integers().map(str) | st.floats().map(str))
def test_a_variable_accepts_a_text_or_names_the_expected_one(name: str, text: str) -> None:
    variable = VARIABLE_OF[name]
    taken(lambda: Options().with_environment({variable: text}), variable)


# --- what is accepted works -------------------------------------------------------------------

ACCEPTED = [
    pytest.param(name, value, id=f"{name}-{number}")
    for name, values in OPTIONS.items()
    for number, value in enumerate(values.accepted)
    if repr(value) != repr(DEFAULTS[name])  # which all other cases use
]
BUCKETS = plan_buckets([TensorSpec("v", (40,), np.dtype("f4"))], 128)


def reduced(cluster: Cluster, options: Options) -> list[Any]:
    """Returns the sums of a call and of a bucket on one rank."""
    with connect_ring(cluster, options) as communicator:
        own = np.full(40, communicator.rank + 1, np.float32)
        total = communicator.all_reduce(own)
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        reducer.launch(0, [own])
        result = [total, reducer.wait(0)[0]]
        communicator.barrier("the end")
        reducer.close()
        return result


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_an_accepted_option_works(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").touch(mode=0o600)
    Path("token").write_text("known to both")
    limit_s = deadline_s(DEADLINE_S)
    seconds = {"rendezvous_timeout_s": limit_s, "collective_timeout_s": limit_s}
    options = Options(**{**seconds, name: value})
    no_time = [RetryableError] if value == 0.001 else []  # to connect
    with reserved_addresses(2) as addresses, ThreadPoolExecutor() as threads:
        clusters = [Cluster.from_dict(jobs_of(addresses), *task_of(rank)) for rank in range(2)]
        for result in [threads.submit(reduced, cluster, options) for cluster in clusters]:
            with contextlib.suppress(*no_time):
                np.testing.assert_array_equal(result.result(2 * limit_s), [[3.0] * 40] * 2)


# --- the page ---------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "options.md").read_text()


def test_the_options_page_lists_each_option_once_with_default_and_unit() -> None:
    for name, default in DEFAULTS.items():
        shown_default = f'"{default}"' if isinstance(default, str) else str(default)
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        assert row.startswith(f"| `{name}` | {shown_default} |")
        units = {"_s": "seconds:", "_mb": "MiB:", "_bytes": "bytes:", "_steps": "steps:"}
        unit = next((unit for suffix, unit in units.items() if name.endswith(suffix)), "")
        assert f"| {unit}" in row


def test_the_options_page_lists_all_choices() -> None:
    for field in dataclasses.fields(Options):
        values = getattr(field.metadata["allowed"], "values", ())
        shown = ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in values)
        assert f"| {shown} |" in PAGE or not values, field.name


def test_the_options_page_names_all_options_that_must_match() -> None:
    cluster = Cluster.from_dict({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, "chief", 0)
    compared = HelloMessages(Peers(cluster), Options()).build().keys() & DEFAULTS.keys()
    for name in DEFAULTS:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        is_equal = row.split("|")[4].strip() in ("equal", "all or none") and name != "tls_dir"
        # buckets are compared before the first step
        assert is_equal == (name in compared or name == "bucket_mb"), name
    (sentence,) = re.findall(r"^Ranks compare .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = {*re.findall(r"`(\w+)`", sentence)}
    assert named | {"timeline"} == compared


def test_the_options_page_lists_each_variable_that_the_code_reads() -> None:
    code = [
        path.read_text()
        for name in ("hostopt", "estimator_ext")
        for path in (ROOT / name).rglob("*.py")
    ]
    read = {*re.findall(r"\bHOSTOPT_[A-Z_]*[A-Z]\b", "\n".join(code))}
    assert read <= {*VARIABLES}
    others = PAGE[PAGE.index("## Other variables") :]
    listed = {*re.findall(r"^\| `(HOSTOPT_[A-Z_]+)` \|", others, re.MULTILINE)}
    assert {*VARIABLES} - {*VARIABLE_OF.values()} == listed - {"HOSTOPT_PEERS"}
