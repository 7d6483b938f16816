"""Runs a command, and watches the training in it once a second until it ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hostopt import lock_file
from hostopt.errors import HostOptError
from hostopt.options import Options
from hostopt.transport.grpc.observer import observe

_EVERY_S = 1.0
_TIMEOUT_S = 10.0


class Terminal:
    """The standard error of a command, on a pseudo terminal, and the metrics that it announces."""

    def __init__(self) -> None:
        self._controller, self.descriptor = pty.openpty()
        self._address = ""
        self.has_line = False

    def follow(self) -> None:
        """Starts to read the terminal; call it once the command has started."""
        os.close(self.descriptor)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        received = b""
        with contextlib.suppress(OSError):  # all processes have closed the other end
            while part := os.read(self._controller, 4096):
                received += part
                found = re.search(rb"metrics: (http://\S+)", received)
                self._address = found[1].decode() if found else ""
                self.has_line = self.has_line or b" steps/s" in part

    def scrape(self) -> bool:
        """Reads the metrics, and returns True if they and the line show a training."""
        if not self._address:
            return False
        with urllib.request.urlopen(self._address, timeout=_TIMEOUT_S) as response:
            return self.has_line and b"\nhostopt_step " in response.read()


def find_model_dir(parent: Path) -> Path | None:
    """Returns the directory below `parent` in which a training runs; None if there is none."""
    return next((path.parent for path in parent.glob(f"*/{lock_file.TRAINING}")), None)


def status(parent: Path) -> bool:
    """Runs `hostopt status`, and returns True if all ranks have answered."""
    model_dir = find_model_dir(parent)
    if model_dir is None:
        return False
    command = [sys.executable, "-m", "hostopt", "status", str(model_dir)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S)
    return done.returncode == 0 and b"rank" in done.stdout


def ask(parent: Path) -> bool:
    """Asks as `hostopt status` does, in this process."""
    model_dir = find_model_dir(parent)
    holder = None if model_dir is None else lock_file.last_holder(model_dir / lock_file.TRAINING)
    if holder is None or not holder.ring:
        return False
    with contextlib.suppress(HostOptError):  # the training has ended
        overview = observe(holder.ring[0], Options())
        return not any(isinstance(each, str) for each in overview["ranks"])
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["terminal", "status", "ask"], required=True)
    parser.add_argument("--parent", type=Path, required=True, help="directory with the model_dir")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    looks: dict[str, Callable[[Path], bool]] = {"status": status, "ask": ask}
    if args.how == "terminal":
        terminal = Terminal()
        process = subprocess.Popen(args.command[1:], stderr=terminal.descriptor)
        terminal.follow()
        looks["terminal"] = lambda _: terminal.scrape()
    else:
        process = subprocess.Popen(args.command[1:])
    seen = 0
    while process.poll() is None:
        began_s = time.monotonic()
        with contextlib.suppress(OSError):  # the run has ended meanwhile
            seen += looks[args.how](args.parent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(began_s + _EVERY_S - time.monotonic(), 0.0))
    if not process.returncode and not seen:
        sys.exit("watch: the training has never been seen")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
