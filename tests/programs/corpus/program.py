"""What the corpus says of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Program:
    """A program of the corpus, and what is expected of it.

    Args:
      name: unique name.
      source: "package==version" on PyPI, "TensorFlow", or "own" for programs of this project with
        the traits of published ones.
      command: a script of this directory, or "-m" and a module, and its arguments. {model_dir},
        {batch_size}, {steps}, {data}, {examples} and {directory} are replaced.
      models: the models that it trains, which count as programs of their own.
      prepare: commands of Python that write its data to {data}, once for all programs.
      batch_size: batch size of all ranks.
      is_global: the batch size of the command is that of all ranks, as for a TPUEstimator.
      in_cluster: the reference is a cluster of one rank, in which the learning rate is read before
        global_step is incremented.
      tolerance: relative and absolute, for the variables of two ranks and of one process.
      noise: names of variables whose gradients are zero except for rounding errors.
      starts_alike: the initial values are constants, so no checkpoint is copied: the names of some
        variables are those of operations.
      prepared: patterns of files that it writes before it trains, if they are missing. Two ranks
        would write them at the same time, and differently. Therefore they get the files of the
        first run.
      not_compared: why the variables of two ranks are not compared with those of one process.
      refused: words of the message that ends the program on two ranks, with exit code 78.
    """

    name: str
    source: str
    command: str
    licence: str = "Apache-2.0"
    models: tuple[str, ...] = ("",)
    options: str = ""
    prepare: tuple[str, ...] = ()
    batch_size: int = 32
    is_global: bool = False
    in_cluster: bool = False
    tolerance: float = 1e-5
    noise: str = ""
    starts_alike: bool = False
    prepared: tuple[str, ...] = ()
    not_compared: str = ""
    refused: str = ""


def driver(name: str, source: str, command: str = "", **fields: Any) -> Program:
    """Describes a program with the arguments that all drivers of this directory have."""
    arguments = "--model-dir={model_dir} --batch-size={batch_size} --steps={steps}"
    return Program(name, source, f"{command or f'{name}.py'} {arguments}", **fields)
