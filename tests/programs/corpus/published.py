"""Programs with packages of PyPI, which ../../published.txt lists."""

from __future__ import annotations

from programs.corpus.program import Program

BERT_DATA = (
    "{examples}/bert/make_data.py {data}",
    "-m estimator_ext -m bert.create_pretraining_data "
    "--flagfile={data}/create_pretraining_data.flags",
)
DEEPCTR = "AFM AutoInt CCPM DCN DeepFEFM DeepFM FNN FiBiNET FwFM NFM PNN WDL xDeepFM"


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


def driver(name: str, source: str, licence: str, **fields: object) -> Program:
    """Describes a program with the arguments that all drivers of this directory have."""
    arguments = "--model-dir={model_dir} --batch-size={batch_size} --steps={steps}"
    return Program(name, source, licence, f"{name}.py {arguments}", **fields)  # type: ignore


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
    driver(
        "with_deepctr",
        "deepctr==0.9.4",
        "Apache-2.0",
        models=tuple(f"{name}Estimator" for name in DEEPCTR.split()),
        # it adds penalties on rows of embeddings, with small factors, to a sum over the batch
        options="--loss sum",
    ),
    driver("with_ranking", "tensorflow-ranking==0.3.1", "Apache-2.0"),
    driver("with_slim", "tf-slim==1.1.0", "Apache-2.0"),
    driver(
        "with_adanet",
        "adanet==0.9.0",
        "Apache-2.0",
        refused="AutoEnsembleEstimator overrides the method `train`",
    ),
)
