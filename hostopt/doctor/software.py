"""Checks of installed packages and environment variables."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hostopt.doctor.checking import NOTE, OK, WRONG, Finding
from hostopt.options import PREFIX, VARIABLES, Options
from hostopt.versions import has_keras_3

_TESTED_PYTHON = (3, 13)
_SHOWN = ("numpy", "grpcio", "protobuf", "tensorflow", "tf_keras")
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def installed() -> dict[str, str]:
    """Returns the versions of the installed packages that ranks compare."""
    versions = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("hostopt", *_SHOWN):
        version = _version(name)
        if version is not None:
            versions[name] = version
    return versions


def versions() -> Iterator[Finding]:
    """Checks the requirements of hostopt, and those of the packages that it requires."""
    packages = installed()
    if "hostopt" not in packages:
        yield Finding(WRONG, "hostopt is not installed: run pip install in its repository")
        return
    wrong = sorted(set(_unmet()))
    yield from (Finding(WRONG, text) for text in wrong)
    if sys.version_info[:2] > _TESTED_PYTHON:
        newest = ".".join(map(str, _TESTED_PYTHON))
        yield Finding(
            NOTE, f"Python {packages['Python']} is newer than {newest}, the newest tested version"
        )
    if not wrong:
        yield Finding(OK, ", ".join(f"{name} {version}" for name, version in packages.items()))


def _unmet() -> Iterator[str]:
    from packaging.requirements import Requirement  # installed with TensorFlow
    from packaging.specifiers import SpecifierSet

    direct = [Requirement(text) for text in importlib.metadata.requires("hostopt") or ()]
    packages = ["hostopt", *(each.name for each in direct if _applies(each))]
    python = ".".join(map(str, sys.version_info[:3]))
    for package in packages:
        if _version(package) is None:
            continue  # reported as a requirement of hostopt
        wanted = ",".join(importlib.metadata.metadata(package).get_all("Requires-Python") or ())
        if python not in SpecifierSet(wanted):
            yield f"Python is {python}, but {package} requires {wanted}: use another Python"
        for text in importlib.metadata.requires(package) or ():
            requirement = Requirement(text)
            if not _applies(requirement):
                continue
            version = _version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                yield (
                    f"{requirement.name} is {version or 'not installed'}, but {package} "
                    f"{_version(package)} requires {requirement.specifier or 'it'}: "
                    f"pip install '{needed}'"
                )


def _applies(requirement: Any) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def keras(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that `tf.keras` is Keras 2, which Estimator needs."""
    value = environ.get(_LEGACY_KERAS)
    if not has_keras_3():
        yield Finding(OK, "tf.keras is Keras 2, included in TensorFlow")
    elif value is None:
        yield Finding(
            NOTE,
            f"{_LEGACY_KERAS} is not set: a program that uses tf.keras before it imports "
            f"estimator_ext gets Keras 3. Set {_LEGACY_KERAS}=1, as `hostopt run` does",
        )
    elif value in ("1", "true", "True"):
        yield Finding(OK, f"{_LEGACY_KERAS} is {value}: tf.keras is Keras 2")
    else:
        yield Finding(
            WRONG,
            f"{_LEGACY_KERAS} is {value!r}, so tf.keras is Keras 3, which does not support "
            "Estimator: set it to 1",
        )


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the names and values of the HOSTOPT_* variables."""
    Options().with_environment(environ)
    names = sorted(name for name in environ if name.startswith(PREFIX))
    unknown = [name for name in names if name not in VARIABLES]
    for name in unknown:
        yield Finding(NOTE, f"hostopt does not read {name}")
    if not unknown:
        yield Finding(OK, f"HOSTOPT_* variables: {', '.join(names) or 'none is set'}")


def proxies(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Notes the proxies in the environment."""
    names = sorted(name for name in environ if name.lower() in _PROXIES)
    if names:
        text = f"{', '.join(names)}: ignored, as ranks connect to each other directly"
        yield Finding(NOTE, text)
    else:
        yield Finding(OK, "no proxies")
