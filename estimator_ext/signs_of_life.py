"""How long an evaluator waits for a chief of which it sees nothing."""

from __future__ import annotations

import os

import tensorflow as tf

import hostopt
from estimator_ext.model_dir_lock import is_training

__all__: list[str] = []

_log = tf.get_logger()

_LOOK_EVERY_S = 5.0


class SignsOfLife:
    """Looks for signs of the chief: the lock that it holds in training, and new checkpoints.

    Args:
      model_dir: directory that chief and evaluators share.
      options: `evaluator_timeout_s`, and `stall_warning_s` for the first warning.
    """

    def __init__(self, model_dir: str, options: hostopt.Options) -> None:
        self._model_dir = model_dir
        self._options = options
        self._saved = self._last_save()
        self._is_known = is_training(model_dir)
        self._look_every_s = min(_LOOK_EVERY_S, options.stall_warning_s)
        self._begin_anew()

    def waited(self, pause_s: float) -> None:
        """Note a time of waiting, and look now and then; evaluations do not count.

        Args:
          pause_s: how long this evaluator has waited.

        Raises:
          hostopt.RendezvousTimeoutError: no chief has come.
          hostopt.PeerLostError: the chief has gone, and none came instead.
        """
        self._silent_s += pause_s
        limit_s = self._options.evaluator_timeout_s
        if self._silent_s < min(self._look_at_s, limit_s):
            return
        self._look_at_s = self._silent_s + self._look_every_s
        saved = self._last_save()
        if saved != self._saved or is_training(self._model_dir):
            self._saved, self._is_known = saved, True
            self._begin_anew()
            return
        seen = (
            f"this evaluator has seen nothing of the chief for {self._silent_s:.0f} s: nobody "
            f"trains in {self._model_dir}, and there is no new checkpoint"
        )
        if self._silent_s >= limit_s:
            kind = hostopt.PeerLostError if self._is_known else hostopt.RendezvousTimeoutError
            raise kind(
                f"{seen}. Look at the output of the chief and start all again; if it needs longer "
                f"to begin, or between two checkpoints, raise evaluator_timeout_s ({limit_s:g})"
            )
        if self._silent_s >= self._warning_at_s:
            self._warning_at_s *= 2
            _log.warning("%s. It waits for up to %g s", seen, limit_s)

    def _begin_anew(self) -> None:
        self._silent_s = 0.0
        self._look_at_s = self._look_every_s
        self._warning_at_s = self._options.stall_warning_s

    def _last_save(self) -> int | None:
        """When the newest checkpoint was saved; None where there is none."""
        try:
            return int(tf.io.gfile.stat(os.path.join(self._model_dir, "checkpoint")).mtime_nsec)
        except tf.errors.OpError:
            return None
