"""What is installed, and what the environment says."""

from __future__ import annotations

import difflib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hostopt.doctor.checking import NOTE, OK, WRONG, Finding
from hostopt.options import VARIABLES, Options

__all__: list[str] = []

_TESTED_PYTHON = (3, 13)
_SHOWN = ("numpy", "grpcio", "protobuf", "tensorflow", "tf_keras")
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def installed() -> dict[str, str]:
    """Versions of what a rank needs, as ranks compare them; without what is not installed."""
    versions = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("hostopt", *_SHOWN):
        found = _version(name)
        if found is not None:
            versions[name] = found
    return versions


def versions() -> Iterator[Finding]:
    """What hostopt, and what it needs itself, want to be installed, against what is."""
    found = installed()
    if "hostopt" not in found:
        yield Finding(WRONG, "hostopt is not installed: pip install it, with what it needs")
        return
    wrong = sorted(set(_unmet()))
    yield from (Finding(WRONG, text) for text in wrong)
    if sys.version_info[:2] > _TESTED_PYTHON:
        newest = ".".join(map(str, _TESTED_PYTHON))
        yield Finding(
            NOTE, f"Python {found['Python']} is newer than {newest}, the last tested one"
        )
    if not wrong:
        yield Finding(OK, ", ".join(f"{name} {version}" for name, version in found.items()))


def _unmet() -> Iterator[str]:
    """What hostopt requires, and each of those, such as TensorFlow its protobuf, and is not so."""
    from packaging.requirements import Requirement  # which TensorFlow requires
    from packaging.specifiers import SpecifierSet

    direct = [Requirement(text) for text in importlib.metadata.requires("hostopt") or ()]
    packages = ["hostopt", *(each.name for each in direct if _applies(each))]
    python = ".".join(map(str, sys.version_info[:3]))
    for package in packages:
        if _version(package) is None:
            continue  # hostopt's own requirements name it
        wanted = ",".join(importlib.metadata.metadata(package).get_all("Requires-Python") or ())
        if python not in SpecifierSet(wanted):
            yield f"Python is {python}, {package} wants {wanted}: use another Python"
        for text in importlib.metadata.requires(package) or ():
            requirement = Requirement(text)
            if not _applies(requirement):
                continue
            found = _version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                yield (
                    f"{requirement.name} is {found or 'not installed'}, {package} "
                    f"{_version(package)} wants {requirement.specifier or 'any'}: "
                    f"pip install '{needed}'"
                )


def _applies(requirement: Any) -> bool:
    """Whether a requirement is one of this machine, and of no extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def keras(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether `tf.keras` will be the Keras that works in Estimator's graphs."""
    release = (_version("tensorflow") or "0.0").split(".")[:2]
    value = environ.get(_LEGACY_KERAS)
    if [int(part) for part in release] < [2, 16]:
        yield Finding(OK, "tf.keras is Keras 2, TensorFlow's own")
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
            f"{_LEGACY_KERAS} is {value!r}, so tf.keras is Keras 3, which is not made for "
            f"Estimator's graphs: set it to 1",
        )


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the HOSTOPT_* variables are known, and their values accepted."""
    ours = sorted(name for name in environ if name.startswith("HOSTOPT_"))
    unknown = [name for name in ours if name not in VARIABLES]
    for name in unknown:
        near = difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.8)
        if near:
            text = f"{name} is set, which hostopt does not read: did you mean {near[0]}?"
            yield Finding(WRONG, text)
        else:
            yield Finding(NOTE, f"{name} is set, which hostopt does not read")
    Options().with_environment(environ)
    if not unknown:
        yield Finding(OK, f"HOSTOPT_* variables: {', '.join(ours) or 'none is set'}")


def proxies(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Proxies that the environment names."""
    found = sorted(name for name in environ if name.lower() in _PROXIES)
    if found:
        text = f"{', '.join(found)}: the ranks reach each other directly, and ignore proxies"
        yield Finding(NOTE, text)
    else:
        yield Finding(OK, "no proxies")
