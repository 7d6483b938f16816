"""Programs with the estimators of TensorFlow, and with the ways of published programs."""

from __future__ import annotations

from programs.corpus.program import Program

ARGUMENTS = "--model-dir={model_dir} --batch-size={batch_size} --steps={steps}"

PROGRAMS = (Program("wide_deep", "TensorFlow", "Apache-2.0", f"wide_deep.py {ARGUMENTS}"),)
