"""Draws the loss over time, and the bytes sent, of several ways of training."""

import numpy as np
from matplotlib.figure import Figure

WINDOW = 20  # steps, whose mean loss is drawn


def draw(runs, file):
    """Draws two panels.

    Args:
      runs: by way of training, its loss and seconds of each step, and megabytes.
      file: the picture, which is written.
    """
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for place, (name, run) in enumerate(runs.items()):
        window = min(WINDOW, len(run["loss"]))
        loss = np.convolve(run["loss"], np.full(window, 1 / window), mode="valid")
        left.plot(run["seconds"][window - 1 :], loss, label=name)
        bar = right.barh(place, run["sent_mb"], log=True)
        right.bar_label(bar, fmt="%.0f", padding=3)
    left.set(xscale="log", xlabel="seconds", ylabel=f"loss, mean of {window} steps")
    left.legend()
    right.set(xlabel="megabytes sent by a worker", yticks=range(len(runs)), yticklabels=runs)
    right.margins(x=0.3)
    right.invert_yaxis()
    figure.savefig(file, dpi=80)
