"""Extreme values of every option: refused with a message of two sentences, or usable."""

from __future__ import annotations

import dataclasses
import decimal
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import DEADLINE_S, ROOT, deadline_s, jobs_of, python, reserved_addresses, task_of
from hypothesis import given
from hypothesis import strategies as st

from hostopt import bench, cli
from hostopt.cluster import Cluster
from hostopt.connect import connect_ring
from hostopt.errors import ConfigError, HostOptError, ResourceError, RetryableError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer
from hostopt.options import MAX_COUNT, MAX_SEGMENT_BYTES, VARIABLES, YEAR_S, Options
from hostopt.transport.grpc.hello import HelloMessages
from hostopt.transport.grpc.peers import Peers
from hostopt.transport.security import read_token

DEFAULTS = dataclasses.asdict(Options())
HUGE = 10**5000  # Python does not print it
# Invalid values of numbers, choices and paths.
OTHERS: list[Any] = [
    b"25",
    [1],
    {},
    object(),
    (),
    np.array([1, 2]),
    np.float32(4),
    np.int64(4),
    decimal.Decimal(4),
    1j,
    float,
]
NUMBERS: list[Any] = [
    *(0, -1, HUGE, -HUGE, 10**30, 1e308, -1e308, 1e-300, 5e-324, -0.0, YEAR_S * 1.001),
    *(float("nan"), float("inf"), -float("inf"), 99999999999, 1 << 63, True, False, None),
    *("25", "", "\0", "nan"),
]
PATHS: list[Any] = [0, 1.5, True, "", "a\0b", "\ud800", b"trace", HUGE]
SECONDS = [0.001, YEAR_S, 10, np.float64(10)]
ACCEPTED: dict[str, list[Any]] = {
    "bucket_mb": [1 / 8192, 1 << 20, 3, np.float64(2)],
    "segment_bytes": [1, 3, MAX_SEGMENT_BYTES],
    "rendezvous_timeout_s": SECONDS,
    "stall_warning_s": SECONDS,
    "collective_timeout_s": SECONDS,
    "evaluator_timeout_s": SECONDS,
    "communication": ["auto", "grpc", "shm", np.str_("grpc")],
    "compression": [None, "fp16", "bf16"],
    "timeline": [None, "trace.json", "..", "no/such/directory/trace", Path("trace"), "é" * 90],
    "checksum": [None, True, False],
    "nonfinite": ["error", "skip", "warn"],
    "desync_check_steps": [0, 1, MAX_COUNT],
    "debug_dir": [None, "debug", Path("debug"), "é"],
    "token_file": [None, "token", Path("token")],
    "tls_dir": [None],
    "insecure": [True, False],
    "restore_previous": [True, False],
    "autotune": [True, False],
}
REFUSED = {
    **{name: [*NUMBERS, *OTHERS] for name, v in DEFAULTS.items() if type(v) in (int, float)},
    **{name: [*PATHS, *OTHERS] for name in ("debug_dir", "token_file", "tls_dir")},
    "timeline": [*PATHS, *OTHERS, "/", "."],
}
for choice in sorted(set(DEFAULTS) - set(REFUSED)):
    REFUSED[choice] = [0, 1, 1.0, HUGE, "", "\0", "AUTO", "x" * 10_000, *OTHERS]
REFUSED["desync_check_steps"].remove(0)
REFUSED["desync_check_steps"].remove(10**30)


def shown(value: object) -> str:
    """Returns the name of a case; a number of 5000 digits cannot be printed."""
    return "huge" if value in (HUGE, -HUGE) else repr(value)[:20]


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in table.items()
        for i, value in enumerate(values)
    ]


def check_refusal(error: ConfigError, label: str) -> None:
    """Checks for two sentences: the value and the expected one, and the remedy."""
    text = str(error)
    assert len(text) < 500
    assert re.fullmatch(rf"{label} is .*, wanted .*\. Correct it, or leave it .*", text, re.DOTALL)


# --- what is refused --------------------------------------------------------------------------


def test_the_tables_name_every_option() -> None:
    assert set(ACCEPTED) == set(REFUSED) == set(DEFAULTS)


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_an_option_refuses(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**{name: value})
    check_refusal(caught.value, f"option {name}")


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("text", ["\0", "9" * 5000, "²", "-1", "1e999", "nan", "0x10", "x" * 9999])
def test_a_variable_is_refused_or_sets_an_option(name: str, text: str) -> None:
    variable = f"HOSTOPT_{name.upper()}"
    try:
        result = Options().with_environment({variable: text})
    except ConfigError as error:
        check_refusal(error, variable)
    else:
        assert getattr(result, name) == text
        assert name.endswith(("_dir", "_file")) or name == "timeline"


@pytest.mark.parametrize("name", ["timeline", "debug_dir", "token_file", "tls_dir"])
@pytest.mark.parametrize("text", ["true", "false", "1", "0"])
def test_a_path_may_be_any_text(name: str, text: str) -> None:
    result = Options().with_environment({f"HOSTOPT_{name.upper()}": text})
    assert getattr(result, name) == text


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.sampled_from([HUGE, "grpc", "fp16", "skip", 1e-300, 1e308, *OTHERS]),
    st.lists(st.integers()),
    st.builds(Path, st.text(st.characters(exclude_characters="\0"))),
    st.builds(np.float64, st.floats()),
)


@given(st.sampled_from(list(DEFAULTS)), ANYTHING)
def test_an_option_accepts_a_value_or_names_the_expected_one(name: str, value: Any) -> None:
    try:
        options = Options(**{name: value})
    except ConfigError as error:
        check_refusal(error, f"option {name}")
    else:
        result = getattr(options, name)
        assert result == (os.fspath(value) if isinstance(value, Path) else value)
        assert options.with_environment({}) == options


@given(st.sampled_from(list(DEFAULTS)), st.text() | st.integers().map(str) | st.floats().map(str))
def test_a_variable_accepts_a_text_or_names_the_expected_one(name: str, text: str) -> None:
    variable = f"HOSTOPT_{name.upper()}"
    try:
        options = Options().with_environment({variable: text})
    except ConfigError as error:
        check_refusal(error, variable)
    else:
        assert options.with_environment({}) == options


# --- what is taken works ----------------------------------------------------------------------

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


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_an_accepted_option_works(
    name: str,
    value: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").touch(mode=0o600)
    Path("token").write_text("known to both")
    limit_s = deadline_s(DEADLINE_S)
    seconds = {"rendezvous_timeout_s": limit_s, "collective_timeout_s": limit_s}
    options = Options(**{**seconds, name: value})
    actual: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            actual[rank] = reduced(Cluster.from_dict(jobs, *task_of(rank)), options)
        except HostOptError as error:
            actual[rank] = error

    with reserved_addresses(2) as addresses:
        jobs = jobs_of(addresses)
        ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(2 * limit_s)
            assert not rank.is_alive()
    for result in actual:
        if value == 0.001 and isinstance(result, RetryableError):
            continue  # no time to connect
        np.testing.assert_array_equal(result, [[3.0] * 40] * 2)


# --- files that are none ----------------------------------------------------------------------


def test_a_token_in_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(ConfigError, match="is empty, expected a token"):
        read_token(Options(token_file=str(tmp_path / "token")), {})


def test_a_token_may_come_through_a_pipe() -> None:
    reader, writer = os.pipe()
    try:
        later = threading.Timer(0.1, lambda: (os.write(writer, b"secret"), os.close(writer)))
        later.start()
        assert read_token(Options(token_file=f"/dev/fd/{reader}"), {}) == b"secret"
        later.join()
    finally:
        os.close(reader)


def test_a_token_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    os.truncate(tmp_path / "token", 1 << 40)
    with pytest.raises(ConfigError, match=r"more than 1048576 bytes\. Give"):
        read_token(Options(token_file=str(tmp_path / "token")), {})


@pytest.mark.parametrize("path", ["/", "/etc/passwd/x", "/no/such", "x" * 5000])
def test_a_token_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*\. Give a file"):
        read_token(Options(token_file=path), {})


# --- commands ---------------------------------------------------------------------------------

NO_NUMBERS = ["", "x", "nan", "inf", "1.5", "1e3", "-1", "1" * 5000, "99999999999999999999"]
COMMANDS = {
    "run -np {}": ["0", "1025", *NO_NUMBERS],
    "run -np 2 --evaluators {}": ["1025", *NO_NUMBERS],
    "run -np 2 --max-restarts {}": ["1000001", *NO_NUMBERS],
    "run -np 2 --max-restarts 1 --min-np {}": ["0", "3", "1025", *NO_NUMBERS],
    "bench -np {}": ["0", "1025", *NO_NUMBERS],
    "bench -np 2 --repetitions {}": ["0", "1000001", *NO_NUMBERS],
    "bench -np 2 --sizes {}": ["0", "1e300", "1e300GiB", "1e13", "6", "-4", "nan", "65GiB", ""],
    "bench -np 2 --communication {}": ["", "nccl"],
    "bench -np 2 --compression {}": ["", "int8"],
    "doctor --timeout-s {}": [
        "0",
        "-1",
        "1e-300",
        "1e308",
        "1e999",
        "nan",
        "x",
        "",
        "99999999999",
    ],
    "trace draw no-file -o no-picture --step {}": ["2147483648", *NO_NUMBERS],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in COMMANDS[command]:
        words = [word.format(value) for word in command.split()]
        program = [] if words[0] != "run" else ["--", "true"]
        with pytest.raises(SystemExit) as caught:
            cli.main([*words, *program])
        assert caught.value.code == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert re.match(r"hostopt [a-z ]+: error: (argument )?-", error)


def test_too_many_tasks_for_the_file_limit_are_reported_in_one_line() -> None:
    code = """
        import resource, sys
        from hostopt import cli
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        sys.exit(cli.main(["run", "-np", "64", "--", sys.executable, "-c", "input()"]))
    """
    result = subprocess.run(
        python(code), check=False, capture_output=True, text=True, timeout=deadline_s(60)
    )
    assert result.returncode == ResourceError.exit_code
    line = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"hostopt: the launcher: not all tasks could be started: .* Start fewer, or .*", line
    )


@pytest.mark.parametrize("path", ["/", "/no/such/directory/times.json"])
def test_unwritable_bench_times_are_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"times cannot be written to .*\. Give another file"):
        bench.save(Path(path), [])


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


def test_the_options_page_names_all_options_that_must_match() -> None:
    cluster = Cluster.from_dict({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}, "chief", 0)
    compared = HelloMessages(Peers(cluster), Options()).build().keys() & DEFAULTS.keys()
    for name in DEFAULTS:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        is_equal = row.split("|")[5].strip() in ("equal", "all or none") and name != "tls_dir"
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
    assert {*VARIABLES} - {f"HOSTOPT_{name.upper()}" for name in DEFAULTS} == listed - {
        "HOSTOPT_PEERS"
    }
