"""Liveness of the chief, as an evaluator sees it."""

from __future__ import annotations

import os

import tensorflow as tf

import hostopt
from estimator_ext.checkpoints.model_dir_lock import is_training

_log = tf.get_logger()

_CHECK_EVERY_S = 5.0


class ChiefLiveness:
    """Watches two signs of life of the chief: its lock of model_dir, and new checkpoints.

    Args:
      model_dir: directory that the chief and the evaluators share.
      options: options with `evaluator_timeout_s`, and with `stall_warning_s` for the first
        warning.
    """

    def __init__(self, model_dir: str, options: hostopt.Options) -> None:
        self._model_dir = model_dir
        self._options = options
        self._saved = self._last_save()
        self._was_seen = is_training(model_dir)
        self._check_every_s = min(_CHECK_EVERY_S, options.stall_warning_s)
        self._reset()

    def waited(self, pause_s: float) -> None:
        """Adds a time of waiting, and checks for signs of life if they are due.

        Args:
          pause_s: time that this evaluator has waited; evaluations do not count.

        Raises:
          hostopt.RendezvousTimeoutError: no chief has started.
          hostopt.PeerLostError: the chief has disappeared, and no other has started.
        """
        self._silent_s += pause_s
        limit_s = self._options.evaluator_timeout_s
        if self._silent_s < min(self._check_at_s, limit_s):
            return
        self._check_at_s = self._silent_s + self._check_every_s
        saved = self._last_save()
        if saved != self._saved or is_training(self._model_dir):
            self._saved, self._was_seen = saved, True
            self._reset()
            return
        text = (
            f"this evaluator has seen nothing of the chief for {self._silent_s:.0f} s: nobody "
            f"trains in {self._model_dir}, and there is no new checkpoint"
        )
        if self._silent_s >= limit_s:
            kind = hostopt.PeerLostError if self._was_seen else hostopt.RendezvousTimeoutError
            raise kind(
                f"{text}. Check the output of the chief and start all processes again; if it "
                "needs longer to start, or between two checkpoints, raise evaluator_timeout_s "
                f"({limit_s:g})"
            )
        if self._silent_s >= self._warning_at_s:
            self._warning_at_s *= 2
            _log.warning("%s. It waits for up to %g s", text, limit_s)

    def _reset(self) -> None:
        self._silent_s = 0.0
        self._check_at_s = self._check_every_s
        self._warning_at_s = self._options.stall_warning_s

    def _last_save(self) -> int | None:
        """Time of the newest checkpoint in ns; None if there is none."""
        try:
            return int(tf.io.gfile.stat(os.path.join(self._model_dir, "checkpoint")).mtime_nsec)
        except tf.errors.OpError:
            return None
