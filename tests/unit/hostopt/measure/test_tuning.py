"""Options chosen by trial: the rules, and the commands with real ranks. Times are not checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from trials import trial

from hostopt import __main__ as cli
from hostopt.errors import ConfigError
from hostopt.measure import bench, tuning
from hostopt.options import MIB, Options


@pytest.mark.parametrize(
    ("seconds", "bucket_bytes"),
    [
        ((1.0, 2.0, 4.0), MIB // 2),  # as fast as any: the smallest
        ((1.0, 1.2, 2.4), MIB),
        ((1.0, 1.5, 2.0), 2 * MIB),
        ((1.0,), MIB // 2),
    ],
)
def test_the_best_bucket_is_the_smallest_that_is_nearly_as_fast(
    seconds: tuple[float, ...], bucket_bytes: int
) -> None:
    assert trial("auto", *seconds).best_bucket_bytes == bucket_bytes


def test_an_earlier_trial_is_preferred_unless_a_later_one_is_clearly_faster() -> None:
    first = trial("auto", 1.0, 1.0, 1.0)
    assert tuning.fastest([first, trial("grpc", 0.97, 0.97, 0.97)]) is first
    assert tuning.fastest([first, trial("grpc", 0.5, 2.0, 1.0)]) is first
    faster = trial("grpc", 0.9, 0.9, 0.9)
    assert tuning.fastest([first, faster, trial("grpc+tcp", 1.0, 1.0, 1.0)]) is faster
    # the slow ring was stopped after the first size
    assert tuning.fastest([trial("grpc", 3.0), faster]) is faster


def test_a_choice_changes_no_other_option() -> None:
    options = Options(compression="bf16", bucket_mb=3, timeline="trace.json", autotune=True)
    chosen = trial("grpc", 1.0, 1.2).applied_to(options)
    assert chosen == Options(
        bucket_mb=1,
        segment_bytes=MIB,
        streams=2,
        communication="grpc",
        compression="bf16",
        timeline="trace.json",
        autotune=True,
    )


def test_the_table_has_a_row_for_each_trial() -> None:
    table = tuning.format_table([trial("auto", 0.001, 0.001, 0.001), trial("grpc", 1.0)])
    assert table.splitlines()[2:] == [
        "| auto | 1 MiB | 2 | 0.524 | 1.049 | 2.097 |",
        "| grpc | 1 MiB | 2 | 0.001 | - | - |",
    ]


@pytest.mark.parametrize("argument", [("--sizes", "1MiB"), ("--repetitions", "3")])
def test_suggest_refuses_what_it_chooses_itself(
    argument: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "-np", "2", "--suggest", *argument])
    assert "omit those arguments" in capsys.readouterr().err


def test_trials_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give another file as --json"):
        bench.save(tmp_path / "no" / "trials.json", [trial("auto", 1.0)])
