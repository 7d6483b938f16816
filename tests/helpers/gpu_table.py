"""Which GPU each rank takes on machines with several numbers of GPUs."""

from __future__ import annotations

import json
import re
import sys

from harness import PROGRAMS

PROGRAM = (sys.executable, str(PROGRAMS / "takes_a_gpu.py"))
# ranks, GPUs of the host, CUDA_VISIBLE_DEVICES (- if it is not set), and the GPU of each rank: a
# number, "all" (the first computes), "CPU", or the ranks that an error names
_TABLE = """
1  0  -    CPU
1  1  -    0
1  2  -    all
1  4  -    all
1  4  3    3
1  4  2,3  all
2  0  -    CPU CPU
2  1  -    [0,1] [0,1]
2  2  -    0 1
2  4  -    0 1
2  4  3    3 3
2  4  2,3  2 3
4  0  -    CPU CPU CPU CPU
4  1  -    [0,1,2,3] [0,1,2,3] [0,1,2,3] [0,1,2,3]
4  2  -    [0,2] [1,3] [0,2] [1,3]
4  4  -    0 1 2 3
4  4  3    3 3 3 3
4  4  2,3  [0,2] [1,3] [0,2] [1,3]
"""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]


def cases_of(size: int) -> dict[str, list[str]]:
    """Returns the GPUs of all ranks by the arguments of the program."""
    return {
        gpus + ("" if visible == "-" else f":{visible}"): taken
        for ranks, gpus, visible, *taken in _ROWS
        if int(ranks) == size
    }


def taken_in(output: str) -> dict[str, list[str]]:
    """Returns what the ranks have printed, in the form of the table."""
    found = dict(json.loads(line) for line in re.findall(r"\[\d+, {.*}\]", output))
    return {case: [_brief(found[rank][case]) for rank in sorted(found)] for case in found[0]}


def _brief(taken: str) -> str:
    refused = re.match(r"ranks ([\d, ]+) of this host find the same GPU.*=true$", taken)
    if refused is not None:
        return f"[{refused[1].replace(' ', '')}]"
    return taken.removeprefix("GPU ")
