"""Doctors of a ring, and installed packages for them to examine."""

from __future__ import annotations

from pathlib import Path

from harness import jobs_of, task_of

from hostopt.commands.doctor import examine
from hostopt.doctor.checking import Finding
from hostopt.launch.environment import tf_config_of

ALONE_S = 0.3  # timeout of a doctor whose peers are missing


def tf_config(addresses: list[str], rank: int = 0) -> str:
    return tf_config_of(jobs_of(addresses), task_of(rank))


def examine_alone(
    environ: dict[str, str] | None = None, model_dir: Path | None = None
) -> list[Finding]:
    """Returns the findings of a doctor without peers."""
    return list(examine(environ or {}, str(model_dir) if model_dir else None, ALONE_S))


def texts(findings: list[Finding], verdict: str) -> list[str]:
    return [text for each, text in findings if each == verdict]


def install(directory: Path, name: str, version: str, *requires: str) -> None:
    """Creates the metadata of an installed package."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
