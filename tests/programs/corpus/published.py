"""Programs with packages of PyPI, which ../../published.txt lists."""

from __future__ import annotations

from typing import Any

from programs.corpus.program import Program, driver

BERT_DATA = (
    "{examples}/bert/make_data.py {data}",
    "-m estimator_ext -m bert.create_pretraining_data "
    "--flagfile={data}/create_pretraining_data.flags",
)
DEEPCTR = tuple(
    f"{name}Estimator"
    for name in (
        *("AFM", "AutoInt", "CCPM", "DCN", "DeepFEFM", "DeepFM", "FNN", "FiBiNET", "FwFM"),
        *("NFM", "PNN", "WDL", "xDeepFM"),
    )
)
BERT = "bert-tensorflow==1.0.4"


def bert(name: str, source: str, command: str, length: str) -> Program:
    return Program(
        name,
        source,
        # the last value of a flag counts
        f"{command} --flagfile={{data}}/{name}.flags {length} --output_dir={{model_dir}}",
        # the runner would find this by itself, but it is given a program that records variables
        options="--v1" if "classifier" in name else "",
        prepare=BERT_DATA,
        is_global=True,
        in_cluster=True,
        # biases that are added to all inputs of a softmax, and so have no effect
        noise=r"/key/bias:|squad/output_bias:",
    )


def library(name: str, source: str, **fields: Any) -> Program:
    return driver(name, source, f"libraries.py --names {name}", **fields)


PROGRAMS = (
    bert("run_classifier", BERT, "-m bert.run_classifier", "--num_train_epochs=1"),
    bert("run_pretraining", BERT, "-m bert.run_pretraining", "--num_train_steps={steps}"),
    bert("run_squad", BERT, "-m bert.run_squad", "--num_train_epochs=2"),
    bert(
        "run_albert_classifier",
        "albert-tensorflow==1.1",
        "{examples}/bert/run_albert_classifier.py",
        "--num_train_epochs=1",
    ),
    # in parts, as a process takes minutes for all
    *(
        driver(
            f"with_deepctr_{part}",
            "deepctr==0.9.4",
            "with_deepctr.py --names " + " ".join(DEEPCTR[part::3]),
            models=DEEPCTR[part::3],
            # it adds penalties on rows of embeddings, with small factors, to a sum over the batch
            options="--loss sum",
        )
        for part in range(3)
    ),
    driver("with_ranking", "tensorflow-ranking==0.3.1"),
    driver("with_slim", "tf-slim==1.1.0"),
    driver(
        "with_adanet",
        "adanet==0.9.0",
        refused="AutoEnsembleEstimator overrides the method `train`",
    ),
    library("gan", "tensorflow-gan==2.1.0", batch_size=16),
    library("adversarial", "neural-structured-learning==1.4.0", batch_size=16),
    library("probability", "tensorflow-probability==0.23.0", batch_size=16),
    library("kfac", "kfac==0.2.4", batch_size=16, options="--v1", starts_alike=True),
    library(
        "constrained",
        "tensorflow-constrained-optimization==0.2",
        batch_size=16,
        not_compared="its rates are quotients over each rank's rows",
    ),
    library(
        "medical",
        "dltk==0.2.1",
        batch_size=16,
        options="--v1",
        not_compared="batch norm is local to each rank",
    ),
    library(
        "privacy",
        "tensorflow-privacy==0.8.0",
        refused="compute gradients outside of the branch, loop or function",
    ),
    library(
        "privacy_unrolled",
        "tensorflow-privacy==0.8.0",
        refused="are clipped or changed in another way before they are added up",
    ),
)
