"""Checkpoints of released versions, below tests/data/legacy/VERSION/TENSORFLOW.

This writes those of the present version. Run it once with each TensorFlow that .ci/run tests:

    python tests/helpers/legacy_sets.py
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT
from ranks import Ranks

import hostopt

SETS = ROOT / "tests" / "data" / "legacy"
SAVED_STEP, LAST_STEP = 4, 8
SAVED_BY = {"adam": 2, "scaled": 2, "local": 2, "divided": 3, "stock": 1}  # ranks, by case
KEPT = (
    f"model/model.ckpt-{SAVED_STEP}.*[!a]",  # without .meta
    f"values-{SAVED_STEP}.npz",
    f"values-{LAST_STEP}.npz",
    "elements-*.json",
)


def train(ranks: Ranks, directory: Path, size: int, cases: Sequence[str]) -> str:
    """Trains cases to the last step, and returns the output of rank 0."""
    arguments = [str(directory), str(SAVED_STEP), str(LAST_STEP), *cases]
    output = ranks.run("legacy.py", size, arguments=arguments)[0].output
    is_divided = "the ranks divide the updates of 2 variables" in output
    assert is_divided == ("divided" in cases and size > 1), output
    return output


def write() -> None:
    """Writes the checkpoints of this version and TensorFlow, and what they hold."""
    tensorflow = importlib.metadata.version("tensorflow").split(".")
    target = SETS / hostopt.__version__ / ".".join(tensorflow[:2])
    if target.exists():
        sys.exit(f"{target} exists. Leave it as it is, as a checkpoint of a release never changes")
    with tempfile.TemporaryDirectory() as name, Ranks(Path(name)) as ranks:
        for size in sorted({*SAVED_BY.values()}):
            cases = [case for case, saved_by in SAVED_BY.items() if saved_by == size]
            train(ranks, Path(name), size, cases)
        for case in SAVED_BY:
            for path in (path for kept in KEPT for path in Path(name, case).glob(kept)):
                copy = target / path.relative_to(name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
            state = f'model_checkpoint_path: "model.ckpt-{SAVED_STEP}"\n'
            (target / case / "model" / "checkpoint").write_text(state)


if __name__ == "__main__":
    write()
