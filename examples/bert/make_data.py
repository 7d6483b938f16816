"""Generates small data and configurations for programs of bert-tensorflow and albert-tensorflow.

The data are opinions about films, documents of such sentences, and questions about people's home
towns. With them each program trains, evaluates and predicts within a minute on a CPU. A file of
flags for each program names all files:

    python examples/bert/make_data.py bert_data
    python -m estimator_ext -m bert.run_classifier --flagfile bert_data/run_classifier.flags
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
GOOD = ["wonderful", "brilliant", "funny", "clever", "moving", "fine"]
BAD = ["awful", "boring", "clumsy", "dull", "stupid", "weak"]
THINGS = ["film", "story", "music", "plot", "cast", "ending", "script", "camera"]
NAMES = ["anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo"]
TOWNS = ["paris", "oslo", "rome", "berlin", "madrid", "vienna", "prague", "dublin"]
OTHER = ["the", "was", "and", "a", "lives", "in", "where", "does", "live", ".", "?"]

CONFIG = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
}
ALBERT = {"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1}


def opinion(chooser: random.Random, is_good: bool) -> str:
    words = GOOD if is_good else BAD
    first, second = chooser.sample(THINGS, 2)
    return (
        f"the {first} was {chooser.choice(words)} and the {second} was {chooser.choice(words)} ."
    )


def write_sentences(directory: Path, chooser: random.Random) -> None:
    """Writes files in the format of the CoLA task; the test data have no labels."""
    for name, count in (("train", 320), ("dev", 64), ("test", 16)):
        rows = ["index\tsentence"] if name == "test" else []
        for index in range(count):
            label = index % 2
            sentence = opinion(chooser, is_good=label == 1)
            rows.append(f"{index}\t{sentence}" if name == "test" else f"id\t{label}\t\t{sentence}")
        (directory / f"{name}.tsv").write_text("\n".join(rows) + "\n")


def write_corpus(path: Path, chooser: random.Random) -> None:
    """Writes documents of one opinion each: one sentence per line, separated by empty lines."""
    documents = (
        "\n".join(opinion(chooser, is_good) for _ in range(8)) for is_good in [False, True] * 20
    )
    path.write_text("\n\n".join(documents) + "\n")


def write_questions(path: Path, chooser: random.Random) -> None:
    """Writes questions in the format of SQuAD 1.1."""
    paragraphs: list[dict[str, Any]] = []
    for number in range(160):
        people = list(zip(chooser.sample(NAMES, 3), chooser.sample(TOWNS, 3)))
        context = " ".join(f"{name} lives in {town} ." for name, town in people)
        name, town = chooser.choice(people)
        answer = {"text": town, "answer_start": context.index(town)}
        question = {
            "id": str(number),
            "question": f"where does {name} live ?",
            "answers": [answer],
        }
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"data": [{"title": "towns", "paragraphs": paragraphs}]}))


def write_flags(path: Path, flags: dict[str, Any]) -> None:
    path.write_text("".join(f"--{name}={value}\n" for name, value in flags.items()))


def write_all_flags(directory: Path) -> None:
    """Writes a file of flags for each program, with output directories below `directory`."""
    vocabulary = {"vocab_file": directory / "vocab.txt"}
    config = {"bert_config_file": directory / "bert_config.json"}
    batches = {"train_batch_size": 16, "learning_rate": 1e-3}
    records = directory / "pretraining.tfrecord"
    sentences = {
        **vocabulary,
        **batches,
        "task_name": "cola",
        "data_dir": directory,
        "do_train": True,
        "do_eval": True,
        "do_predict": True,
        "max_seq_length": 24,
    }
    programs: dict[str, dict[str, Any]] = {
        "run_classifier": {**sentences, **config, "num_train_epochs": 12},
        "run_albert_classifier": {
            **sentences,
            "albert_config_file": directory / "albert_config.json",
            "num_train_epochs": 3,
        },
        "create_pretraining_data": {
            **vocabulary,
            "input_file": directory / "corpus.txt",
            "output_file": records,
            "max_seq_length": 32,
            "max_predictions_per_seq": 5,
            "dupe_factor": 2,
            "masked_lm_prob": 0.5,  # so that each example has the full number of predictions
        },
        "run_pretraining": {
            **config,
            **batches,
            "input_file": records,
            "do_train": True,
            "do_eval": True,
            "max_seq_length": 32,
            "max_predictions_per_seq": 5,
            "num_train_steps": 60,
            "num_warmup_steps": 6,
            "max_eval_steps": 10,
        },
        "run_squad": {
            **vocabulary,
            **config,
            **batches,
            "train_file": directory / "questions.json",
            "predict_file": directory / "questions.json",
            "do_train": True,
            "do_predict": True,
            "max_seq_length": 32,
            "max_query_length": 8,
            "doc_stride": 16,
            "num_train_epochs": 6,
        },
    }
    for name, flags in programs.items():
        if name != "create_pretraining_data":
            flags["output_dir"] = directory / "models" / name
        write_flags(directory / f"{name}.flags", flags)


def make_data(directory: Path, seed: int = 1) -> None:
    """Writes all files; the same seed gives the same files."""
    directory.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(seed)
    vocabulary = [*SPECIAL, *OTHER, *GOOD, *BAD, *THINGS, *NAMES, *TOWNS]
    (directory / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    config = {**CONFIG, "vocab_size": len(vocabulary)}
    (directory / "bert_config.json").write_text(json.dumps(config, indent=2))
    (directory / "albert_config.json").write_text(json.dumps({**config, **ALBERT}, indent=2))
    write_sentences(directory, chooser)
    write_corpus(directory / "corpus.txt", chooser)
    write_questions(directory / "questions.json", chooser)
    write_all_flags(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="directory for the data")
    directory = parser.parse_args().directory.resolve()
    make_data(directory)
    print(f"data for run_classifier, run_pretraining and run_squad are in {directory}")


if __name__ == "__main__":
    main()
