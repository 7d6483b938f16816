"""Programs with packages of PyPI, which ../../published.txt lists."""

from __future__ import annotations

from typing import Any

from programs.corpus.program import Program

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
LIBRARIES = {
    "gan": ("tensorflow-gan==2.1.0", "", ""),
    "adversarial": ("neural-structured-learning==1.4.0", "", ""),
    "probability": ("tensorflow-probability==0.23.0", "", ""),
    "kfac": ("kfac==0.2.4", "--v1", ""),
    "constrained": (
        "tensorflow-constrained-optimization==0.2",
        "",
        "its rates are quotients over each rank's rows",
    ),
    "medical": ("dltk==0.2.1", "--v1", "batch norm is local to each rank"),
}


def bert(name: str, source: str, command: str, length: str, options: str = "") -> Program:
    return Program(
        name=name,
        source=source,
        licence="Apache-2.0",
        command=f"{command} --flagfile={{data}}/{name}.flags --output_dir={{model_dir}} {length}",
        # the runner would find this by itself, but it is given a program that records variables
        options="--v1" if "classifier" in name else options,
        prepare=BERT_DATA,
        is_global=True,
        in_cluster=True,
        # biases that are added to all inputs of a softmax, and so have no effect
        noise=r"/key/bias:|squad/output_bias:",
    )


def driver(name: str, source: str, licence: str, command: str = "", **fields: Any) -> Program:
    """Describes a program with the arguments that all drivers of this directory have."""
    arguments = "--model-dir={model_dir} --batch-size={batch_size} --steps={steps}"
    return Program(name, source, licence, f"{command or f'{name}.py'} {arguments}", **fields)


PROGRAMS = (
    bert(
        "run_classifier",
        "bert-tensorflow==1.0.4",
        "-m bert.run_classifier",
        "--num_train_epochs=1",
    ),
    bert(
        "run_pretraining",
        "bert-tensorflow==1.0.4",
        "-m bert.run_pretraining",
        "--num_train_steps={steps}",
    ),
    bert("run_squad", "bert-tensorflow==1.0.4", "-m bert.run_squad", "--num_train_epochs=2"),
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
            "Apache-2.0",
            command="with_deepctr.py --names " + " ".join(DEEPCTR[part::3]),
            models=DEEPCTR[part::3],
            # it adds penalties on rows of embeddings, with small factors, to a sum over the batch
            options="--loss sum",
        )
        for part in range(3)
    ),
    driver("with_ranking", "tensorflow-ranking==0.3.1", "Apache-2.0"),
    driver("with_slim", "tf-slim==1.1.0", "Apache-2.0"),
    driver(
        "with_adanet",
        "adanet==0.9.0",
        "Apache-2.0",
        refused="AutoEnsembleEstimator overrides the method `train`",
    ),
    *(
        driver(
            name,
            source,
            "Apache-2.0",
            command=f"libraries.py --names {name}",
            options=options,
            not_compared=reason,
            starts_alike=name == "kfac",
            batch_size=16,
        )
        for name, (source, options, reason) in LIBRARIES.items()
    ),
    *(
        driver(
            name,
            "tensorflow-privacy==0.8.0",
            "Apache-2.0",
            command=f"libraries.py --names {name}",
            refused=words,
        )
        for name, words in {
            "privacy": "compute gradients outside of the branch, loop or function",
            "privacy_unrolled": "are clipped or changed in another way before they are added up",
        }.items()
    ),
)
