"""Timelines and step reports of Estimator trainings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from rings import Spawn

import estimator_ext
import hostopt
from estimator_ext.estimator.progress import StepReportHook
from estimator_ext.estimator.training_graph import TrainingGraph
from hostopt.gradients.step_stats import StepTimes

estimator_ext.install()


# -- the option ----------------------------------------------------------------------------


def strategy() -> Any:
    return estimator_ext.HostOffloadStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    )


def test_the_run_config_chooses_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = strategy()
    config = estimator_ext.RunConfig(train_distribute=chosen, timeline="a.json")
    assert config.timeline == "a.json"
    assert config.replace(save_summary_steps=5).timeline == "a.json"
    assert chosen.options.timeline == "a.json"
    estimator_ext.RunConfig(train_distribute=chosen)  # says nothing about it
    assert chosen.options.timeline == "a.json"
    monkeypatch.setenv("HOSTOPT_TIMELINE", "b.json")
    estimator_ext.RunConfig(train_distribute=chosen, timeline="a.json")
    assert chosen.options.timeline == "b.json"


def test_a_timeline_without_a_recording_rank_is_refused() -> None:
    with pytest.raises(hostopt.ConfigError, match=r"timeline is 'a\.json', wanted None"):
        estimator_ext.RunConfig(timeline="a.json")
    chosen = strategy()
    message = r"'a\.json'.* connected .* timeline None"
    with chosen.communicator, pytest.raises(hostopt.ConfigError, match=message):
        estimator_ext.RunConfig(train_distribute=chosen, timeline="a.json")


def test_reducers_that_a_hook_adds_are_not_reported(tmp_path: Path) -> None:
    chosen: Any = strategy()
    reduction: Any = SimpleNamespace(reducers=["of the step"])
    config: Any = SimpleNamespace(save_summary_steps=1)
    stamps: Any = None  # only a timeline shows them
    with chosen.communicator:
        training = TrainingGraph(chosen, reduction, config, str(tmp_path), [])
        (hook,) = training._step_report(stamps)
        reduction.reducers.append("of a hook")
        assert list(hook.reducers) == ["of the step"]


def test_steps_of_loops_are_counted(spawn_inproc: Spawn) -> None:
    times = StepTimes(0, 1.0, 1.0, 0.0, 0.0, 1.0)
    reducer: Any = SimpleNamespace(stats=SimpleNamespace(last=times), count_from=lambda step: None)
    session: Any = SimpleNamespace(run=lambda step: 8)
    config = estimator_ext.RunConfig(save_summary_steps=10, iterations_per_loop=4)

    def run(communicator: hostopt.Communicator) -> tuple[list[int], list[int | None]]:
        sent: list[int] = []
        steps = []
        hook = StepReportHook(communicator, [reducer], config, None)
        hook._reports = SimpleNamespace(
            begin=lambda step: None,
            send=lambda step, times: sent.append(step),
            collect=lambda: None,
        )
        with tf.Graph().as_default():
            hook.after_create_session(session, None)
            for _ in range(5):
                hook.after_run(None, None)
                steps.append(communicator.transport.training_step)
        return sent, steps

    assert spawn_inproc(2, run) == [([12, 20], [12, 16, 20, 24, 28])] * 2
