"""Draws the paths of workers over a loss surface."""

import numpy as np
from matplotlib.figure import Figure

LEVELS = 12
MARGIN = 0.5


def draw(paths_of_title, x, y, file):
    """Draws one or more stages.

    Args:
      paths_of_title: for each title the paths of its workers, [workers, steps + 1, 2].
      x, y: the points that define the loss.
      file: the picture, which is written.
    """
    columns = min(2, len(paths_of_title))
    rows = -(-len(paths_of_title) // columns)
    figure = Figure(figsize=(5 * columns, 4.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    everything = np.concatenate([paths.reshape(-1, 2) for paths in paths_of_title.values()])
    for panel, (title, paths) in zip(panels.flat, paths_of_title.items()):
        _draw_surface(panel, everything, x, y)
        _draw_paths(panel, paths)
        panel.set(title=title, xlabel="w", ylabel="b")
    panels.flat[0].legend(loc="upper right")
    figure.savefig(file, dpi=64)


def _draw_surface(panel, points, x, y):
    low, high = points.min(axis=0) - MARGIN, points.max(axis=0) + MARGIN
    w, b = np.meshgrid(*np.linspace(low, high, 60, axis=1))
    loss = np.mean((w[..., np.newaxis] * x + b[..., np.newaxis] - y) ** 2, axis=-1)
    levels = np.geomspace(loss.min(), loss.max(), LEVELS)
    panel.contour(w, b, loss, levels, colors="0.8", linewidths=0.8)
    panel.plot(*np.polyfit(x, y, deg=1), "k*", markersize=12, zorder=3, label="least loss")


def _draw_paths(panel, paths):
    # paths below others are wider, so that equal ones remain visible
    for worker, path in enumerate(paths):
        width = 1 + 1.5 * (len(paths) - 1 - worker)
        (line,) = panel.plot(*path.T, linewidth=width, alpha=0.8, label=f"worker {worker}")
        panel.plot(*path[0], "o", color=line.get_color(), markersize=6 + width)
