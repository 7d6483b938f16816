"""Decides which lines of a task's standard error are shown, and which are only logged."""

from __future__ import annotations

import re

_MAX_WARNINGS = 1000  # that are remembered
_MAX_CONFIGURATION = 50  # lines

_INFO = re.compile(
    rb"INFO:"  # Python's logging
    rb"|I\d{4} \d\d:\d\d:\d\d"  # absl
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I "  # TensorFlow's C++ code
)
# Messages that TensorFlow logs at every start, or when nothing is wrong.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called"
    rb"|(?:[EW]\d{4} |\d{4}-\d\d-\d\d ).*(?:failed call to cuInit|Unable to register cu"
    rb"|computation_placer already registered|Could not find TensorRT)"
    rb"|WARNING:tensorflow:From .* is deprecated and will be removed"
    rb"|WARNING:tensorflow:No new checkpoint ready for evaluation"
    rb"|Instructions for updating:"
    rb"|To enable the following instructions: "  # continues a message
    rb"|(?:W\d{4} |\d{4}-\d\d-\d\d ).*Local rendezvous is aborting with status: "
    rb"(?:ABORTED: Stopping remaining executors|OUT_OF_RANGE: End of sequence)"  # of the data
)
_INSTRUCTIONS = b"Instructions for updating:"
_CONFIGURATION = b"Using config: {"  # of an Estimator: continues over several lines
_SERVER = b" config: "  # of a data worker: its fields follow, each on a line
_FIELD = re.compile(rb"\w+: \S+$|$")
_RECORD = re.compile(
    rb"(?:DEBUG|INFO|WARNING|ERROR|FATAL|CRITICAL):|Traceback |hostopt: |[IWEF]\d{4} "
    rb"|\d{4}-\d\d-\d\d |Fatal Python error|Aborted|terminate called"
)
_TRACEBACK = b"Traceback "


class LineFilter:
    """Shows errors, each warning once, and lines of no logger; hides informational messages.

    An indented line is hidden or shown with the line before. The configuration of an Estimator is
    hidden to its last brace. The configuration of a data worker is hidden to its last field.
    """

    def __init__(self) -> None:
        self.has_hidden = False  # any line
        self._hides = False
        self._depth = 0  # of braces that a configuration has opened
        self._lines = 0  # of the configuration
        self._is_instruction = False
        self._is_server = False  # the configuration of one
        self._is_traceback = False
        self._warnings: set[int] = set()  # their hashes

    def shows(self, line: bytes) -> bool:
        """Returns True if a line is to be shown."""
        is_indented = line[:1] in (b" ", b"\t")
        if _RECORD.match(line) or self._lines > _MAX_CONFIGURATION:
            self._depth, self._is_instruction, self._is_server = 0, False, False
        hides = self._hides
        is_field = self._is_server and bool(_FIELD.match(line))
        if self._depth > 0 or self._is_instruction or is_field:
            hides = True
        elif is_indented:
            hides = hides and not self._is_traceback  # of which another thread split the lines
        else:
            hides = bool(_INFO.match(line) or _NOISE.match(line)) or self._is_repeated(line)
        if line.startswith(_TRACEBACK):
            self._is_traceback = True
        elif not (is_indented or hides):
            self._is_traceback = False
        self._is_instruction = line.startswith(_INSTRUCTIONS)
        if self._depth > 0 or (hides and _CONFIGURATION in line):
            self._lines = self._lines + 1 if self._depth else 0
            self._depth = max(0, self._depth + line.count(b"{") - line.count(b"}"))
        self._is_server = bool(line.strip()) and (is_field or (hides and _SERVER in line))
        self._hides = hides
        self.has_hidden = self.has_hidden or hides
        return not hides

    def _is_repeated(self, line: bytes) -> bool:
        if not line.startswith(b"WARNING:"):
            return False
        is_repeated = hash(line) in self._warnings
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.add(hash(line))
        return is_repeated
