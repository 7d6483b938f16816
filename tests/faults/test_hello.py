"""Hello messages: their fields, and the errors that name differences."""

from __future__ import annotations

from rings import NewRing


def test_ranks_with_different_hostopt_versions(processes: NewRing) -> None:
    ring = processes(2)
    script = """
        import sys
        from hostopt import versions
        versions.VERSION = sys.argv[1]
        import hostopt
        hostopt.connect()
    """
    started = [ring.start(rank, script, f"1.0.0rc{rank + 1}") for rank in range(2)]
    for process in started:
        assert process.exit_code() == 78, process.stderr
        result = f"{ring.name(0)} has hostopt 1.0.0rc1, {ring.name(1)} has hostopt 1.0.0rc2. "
        assert result in process.stderr
