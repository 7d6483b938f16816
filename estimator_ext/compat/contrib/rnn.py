"""LSTMs of tf.contrib.rnn that are one operation."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v2 as tf

LSTMStateTuple = tf.compat.v1.nn.rnn_cell.LSTMStateTuple


class _BlockLSTM:
    """Variables and computation of an LSTM that is one operation; its gates are i, c, f, o."""

    _default_name = "lstm_cell"
    output_size = 0

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        reuse: bool | None = None,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            _reuse=reuse, dtype=dtype, name=name or self._default_name
        )
        self.output_size = num_units
        clip = -1.0 if cell_clip is None else cell_clip
        self._attributes = {"forget_bias": forget_bias, "cell_clip": clip}
        self._attributes["use_peephole"] = use_peephole

    def build(self: Any, input_shape: Any) -> None:
        """Creates the variables; the last dimension of the inputs must be known."""
        size, depth = self.output_size, tf.TensorShape(input_shape)[-1]
        self._weights = {"w": self.add_weight("kernel", [depth + size, 4 * size])}
        self._weights["b"] = self.add_weight("bias", [4 * size], initializer="zeros")
        for gate in "ifo":
            peephole = tf.zeros([size], self._weights["b"].dtype)
            if self._attributes["use_peephole"]:
                peephole = self.add_weight(f"w_{gate}_diag", [size])
            self._weights[f"wc{gate}"] = peephole
        self.built = True

    def _run(self, inputs: Any, state: Any, steps: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the states c and h after each step, for inputs [time, batch, depth]."""
        weights = {name: tf.convert_to_tensor(each) for name, each in self._weights.items()}
        result = tf.raw_ops.BlockLSTM(
            seq_len_max=tf.cast(steps, tf.int64),
            x=inputs,
            cs_prev=state[0],
            h_prev=state[1],
            **weights,
            **self._attributes,
        )
        return result.cs, result.h


class LSTMBlockCell(_BlockLSTM, tf.compat.v1.nn.rnn_cell.RNNCell):
    """An LSTM cell with the variables of BasicLSTMCell."""

    @property
    def state_size(self) -> Any:
        """The sizes of c and h."""
        return LSTMStateTuple(self.output_size, self.output_size)

    def call(self, inputs: Any, state: Any) -> tuple[tf.Tensor, Any]:
        """Returns the output and the state after a step, for inputs [batch, depth]."""
        c, h = (each[0] for each in self._run(inputs[None], state, 1))
        return h, LSTMStateTuple(c, h)


class LSTMBlockFusedCell(_BlockLSTM, tf.compat.v1.layers.Layer):
    """An LSTM over a whole sequence [time, batch, depth]."""

    _default_name = "lstm_fused_cell"

    def call(
        self,
        inputs: Any,
        initial_state: Any = None,
        dtype: Any = None,
        sequence_length: Any = None,
    ) -> tuple[tf.Tensor, Any]:
        """Returns the outputs [time, batch, units], and the state after the last step.

        Args:
          initial_state: c and h; None for zeros.
          dtype: has no effect.
          sequence_length: [batch]; outputs after it are 0. None if all sequences are complete.
        """
        time, batch = tf.shape(inputs)[0], tf.shape(inputs)[1]
        zeros = tf.zeros([batch, self.output_size], inputs.dtype)
        first = initial_state or (zeros, zeros)
        lengths = tf.fill([batch], time) if sequence_length is None else sequence_length
        lengths = tf.cast(lengths, tf.int32)
        states = self._run(inputs, first, tf.reduce_max(lengths))
        mask = tf.transpose(tf.sequence_mask(lengths, time, inputs.dtype))[:, :, None]
        pairs = ((tf.concat([old[None], new], 0)) for old, new in zip(first, states))
        at = tf.stack([lengths, tf.range(batch)], axis=1)
        return states[1] * mask, LSTMStateTuple(*(tf.gather_nd(each, at) for each in pairs))


class TimeReversedFusedRNN:
    """A fused cell that reads sequences [time, batch, depth] from the end."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __call__(
        self,
        inputs: Any,
        initial_state: Any = None,
        dtype: Any = None,
        sequence_length: Any = None,
        **options: Any,
    ) -> tuple[tf.Tensor, Any]:
        """Returns what the cell does, with the outputs in the order of the inputs."""

        def reverse(sequence: Any) -> tf.Tensor:
            if sequence_length is None:
                return tf.reverse(sequence, [0])
            return tf.reverse_sequence(sequence, sequence_length, seq_axis=0, batch_axis=1)

        options.update(initial_state=initial_state, dtype=dtype, sequence_length=sequence_length)
        outputs, state = self._cell(reverse(inputs), **options)
        return reverse(outputs), state
