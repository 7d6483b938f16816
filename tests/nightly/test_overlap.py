"""Early buckets are reduced while backward computes later gradients."""

from __future__ import annotations

from pathlib import Path

from ranks import Ranks


def test_bucket_1_is_sent_before_the_last_gradient_exists(tmp_path: Path, ranks: Ranks) -> None:
    for rank in ranks.run("overlap.py", 2, arguments=[str(tmp_path / "model")]):
        assert "buckets [0, 1, 2]" in rank.output
