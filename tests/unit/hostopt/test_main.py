"""The command line of `hostopt run`: usage errors, missing commands, pass-through of arguments."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import deadline_s, python
from launcher import lines_of

from hostopt import __main__ as cli
from hostopt.commands import run
from hostopt.errors import ConfigError, ResourceError
from hostopt.launch import output

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")


@pytest.mark.parametrize(
    "command", [["no-such-command"], ["no_such_script.py"], ["/etc/passwd"], ["--", "nothing"]]
)
def test_a_missing_command_is_named(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-np", "2", *command]) == 2
    assert command[-1] in capfd.readouterr().err
    assert not psutil.Process().children()


def test_a_command_that_cannot_be_executed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    assert cli.main(["run", "-np", "2", str(broken)]) == 2
    assert f"[chief:0] hostopt: cannot start {str(broken)!r}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.EMFILE, ResourceError, "no file descriptor is left ("),
        (errno.ENOSPC, ConfigError, "not all tasks could be started: "),
    ],
)
def test_errors_of_the_launcher_have_an_exit_code_and_advice(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    kind: type[ConfigError | ResourceError],
    text: str,
) -> None:
    def launch(*_: object, **__: object) -> int:
        raise OSError(number, "no more")

    monkeypatch.setattr(run, "launch", launch)
    assert cli.main(["run", "-np", "2", "true"]) == kind.exit_code
    output.flush()
    assert f"hostopt: {text}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["run", "-np", "2"],
        ["run", "-np", "2", "--"],
        ["run", "true", "-np", "1"],
        ["run", "-np", "2", "--min-np", "1", "true"],
        ["walk"],
    ],
)
def test_usage_errors_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: hostopt" in capsys.readouterr().err


NO_COUNTS = ["", "x", "nan", "inf", "1.5", "1e3", "-1", "1" * 5000, "99999999999999999999"]
COMMANDS = {
    "run -np {}": ["0", "1025", *NO_COUNTS],
    "run -np 2 --evaluators {}": ["1025", *NO_COUNTS],
    "run -np 2 --max-restarts {}": ["1000001", *NO_COUNTS],
    "run -np 2 --max-restarts 1 --min-np {}": ["0", "3", "1025", *NO_COUNTS],
    "bench -np {}": ["0", "1025", *NO_COUNTS],
    "bench -np 2 --repetitions {}": ["0", "1000001", *NO_COUNTS],
    "bench -np 2 --sizes {}": ["0", "1e300", "1e300GiB", "1e13", "6", "-4", "nan", "65GiB", ""],
    "bench -np 2 --communication {}": ["", "nccl"],
    "bench -np 2 --compression {}": ["", "int8"],
    "doctor --timeout-s {}": [
        *("0", "-1", "1e-300", "1e308", "1e999", "nan", "x", "", "99999999999"),
    ],
    "trace draw no-file -o no-picture --step {}": ["2147483648", *NO_COUNTS],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in COMMANDS[command]:
        words = [word.format(value) for word in command.split()]
        program = [] if words[0] != "run" else ["--", "true"]
        with pytest.raises(SystemExit) as caught:
            cli.main([*words, *program])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("usage: hostopt")
        assert re.match(r"hostopt [a-z ]+: error: (argument )?-", error.splitlines()[-1])


def test_too_many_tasks_for_the_file_limit_are_reported_in_one_line() -> None:
    code = """
        import resource, sys
        from hostopt import __main__ as cli
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


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("hostopt ")


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_after_the_command_belong_to_the_command(
    dashes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "main.py"
    script.write_text("import sys; print(sys.executable, *sys.argv[1:])")
    own = ["-np", "7", "--version", "-h", "--", "--evaluators", "2"]
    assert cli.main(["run", "-np", "1", *dashes, str(script), *own]) == 0
    (line,) = lines_of(capfd.readouterr().out, "chief:0")
    assert line == " ".join([sys.executable, *own])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--address", "node1:6379"], "--address needs --on ray"),
        (["--resources", "CPU=2"], "--resources needs --on ray"),
        (["--places-timeout-s", "5"], "--places-timeout-s needs --on ray"),
        (["--on", "ray", "--bind-to", "cores"], "--bind-to cores contradicts --on ray"),
        (["--on", "ray", "--resources", "CPU"], "'CPU' is not NAME=NUMBER"),
        (["--on", "ray", "--resources", "GPU=0"], "'GPU=0' is not NAME=NUMBER with a whole"),
        (["--on", "ray", "--resources", "CPU=1.5"], "'CPU=1.5' is not NAME=NUMBER with a whole"),
        (["--on", "ray", "--places-timeout-s", "0"], "0 is not above 0"),
        (["--on", "slurm"], "invalid choice: 'slurm'"),
    ],
)
def test_arguments_about_machines_that_contradict_each_other(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["run", "-np", "1", *arguments, "true"])
    assert error.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("ray://node1:10001", "use `ray job submit`"),
        ("127.0.0.1:9", "no connection to a cluster of Ray at '127.0.0.1:9': "),
        ("node1", "no connection to a cluster of Ray at 'node1': "),
    ],
)
def test_addresses_of_no_cluster(
    address: str, text: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "-np", "1", "--on", "ray"]
    assert cli.main([*arguments, "--address", address, "true"]) == ConfigError.exit_code
    output.flush()
    assert text in capfd.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert cli.main([*arguments, "true"]) == ConfigError.exit_code
    output.flush()
    assert text in capfd.readouterr().err


def test_the_package_that_is_missing_for_ray(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cli.main(["run", "-np", "1", "--on", "ray", "true"]) == ConfigError.exit_code
    output.flush()
    assert "Run `pip install 'hostopt[ray]'`" in capfd.readouterr().err
