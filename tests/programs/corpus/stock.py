"""Programs with the estimators of TensorFlow, and with the ways of published programs."""

from __future__ import annotations

from typing import Any

from programs.corpus.program import Program, driver


def trains(script: str, *names: str, **fields: Any) -> Program:
    """Describes the programs of a script that has them by name."""
    name, models = (script, names) if len(names) > 1 else (f"{script}.{names[0]}", ("",))
    source = "TensorFlow" if script == "canned" else "own"
    command = f"{script}.py --names {' '.join(names)}"
    return driver(name, source, command, models=models, **fields)


CANNED = (
    "LinearClassifier LinearRegressor LinearEstimator DNNClassifier DNNRegressor DNNEstimator "
    "DNNLinearCombinedRegressor DNNLinearCombinedEstimator BaselineClassifier BaselineRegressor "
    "BaselineEstimator v1.LinearClassifier v1.DNNRegressor v1.DNNLinearCombinedClassifier "
)
WAYS = (
    "deletes_model_dir deletes_model_dir_between_trainings trains_and_evaluates_in_turn "
    "predicts_between_trainings exports_on_every_rank best_and_final_exporters starts_warm "
    "writes_its_records hooks_with_sessions profiles init_fn_of_scaffold saves_and_logs_by_hooks "
    "stops_early keras_model updates_by_hand"
)

DIFFERS = "updates it with a value that differs by rank"
PROGRAMS = (
    driver("resnet_ways", "own, as the official ResNet"),
    driver("lamb_ways", "own, as NVIDIA's BERT", options="--v1 --hvd"),
    *(
        Program(
            f"tagger_{optimizer}",
            "own, as tf.contrib.learn's experiments",
            f"contrib_tagger.py {{model_dir}} {{batch_size}} {optimizer}",
            options="--v1",
            batch_size=16,
        )
        for optimizer in ("LazyAdam", "AdamW")
    ),
    driver("wide_deep", "TensorFlow"),
    trains("canned", *CANNED.split()),
    trains("canned", "RNNClassifier"),
    trains("canned", "KMeans", refused=DIFFERS),
    trains("canned", "LinearSDCA", refused=DIFFERS),
    trains("ways", *WAYS.split()),
    trains("ways", "trains_without_model_dir"),
    trains("ways", "folds"),
    trains("ways", "alternates_tpu_estimators", is_global=True),
    trains("ways", "unsets_tf_config"),
    trains("ways", "multi_worker_strategy"),
    trains("ways", "sets_tf_config", refused="the program has changed TF_CONFIG"),
    trains("ways", "mirrored_strategy"),
    trains("ways", "parameter_server_strategy", refused="there are no parameter servers"),
    trains("ways", "evaluates_in_memory", refused="in an InMemoryEvaluatorHook"),
    trains("canned", "BoostedTreesClassifier", refused="tf.estimator.BoostedTreesClassifier"),
    trains("ways", "shards_its_data", refused="shards its dataset by itself"),
    trains("ways", "servers", refused="the program created no estimator"),
)
