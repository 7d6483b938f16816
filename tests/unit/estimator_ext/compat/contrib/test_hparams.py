"""HParams: attributes, overrides from text and JSON, and errors."""

from __future__ import annotations

import pytest

from estimator_ext.compat.contrib.hparams import HParams


def params() -> HParams:
    return HParams(rate=0.5, units=[8, 4], name="adam", steps=3, clip=None, shuffle=False)


def test_values_are_attributes() -> None:
    result = params()
    result.add_hparam("depth", 2)
    assert (result.rate, result.depth, result.get("name"), result.get("no", 7)) == (
        0.5,
        2,
        "adam",
        7,
    )
    assert "units" in result
    assert "values" not in result
    assert list(result.values()) == ["rate", "units", "name", "steps", "clip", "shuffle", "depth"]
    for name in ("rate", "values"):
        with pytest.raises(ValueError, match="reserved"):
            result.add_hparam(name, 1)


def test_a_text_overrides_values() -> None:
    result = params().parse("rate=1, units=[2,3],name=3,clip=1.5,shuffle=True")
    assert result.values() == {
        "rate": 1.0,
        "units": [2, 3],
        "name": "3",
        "steps": 3,
        "clip": 1.5,
        "shuffle": True,
    }
    assert isinstance(result.rate, float)
    assert params().parse_json(result.to_json()).values() == result.values()
    assert params().parse("").values() == params().values()
    lists = HParams(words=["a"], rates=[0.5], sizes=[])
    result = lists.parse("words=[relu, 3],rates=[1,2],sizes=[7,8]").values()
    assert result == {"words": ["relu", "3"], "rates": [1.0, 2.0], "sizes": [7, 8]}
    assert all(isinstance(rate, float) for rate in result["rates"])


@pytest.mark.parametrize(
    "text", ["size=1", "steps=much", "steps", "units=[1", "name=a]", "steps=true", "shuffle=1"]
)
def test_invalid_text_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"hyperparameter|wanted a (int|bool)"):
        params().parse(text)
