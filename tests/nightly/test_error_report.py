"""Error reports: the printed summary, the file with the traceback and the launcher's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hostopt.process import error_report
from hostopt.process.error_report import cause_of, summary_of


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as result:
        function()
    return result.value


# -- one line ------------------------------------------------------------------------------


def fail_in_tensorflow(where: str) -> None:
    tf = pytest.importorskip("tensorflow")

    def divide(value: Any) -> Any:
        return value / (1 // 0)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None])
        if where == "python":
            y = tf.numpy_function(divide, [x], tf.float32)
        elif where == "twice":
            y = [tf.numpy_function(divide, [x], tf.float32) for _ in range(2)]
        elif where == "dataset":
            data = tf.data.Dataset.range(3).map(lambda i: tf.numpy_function(divide, [i], tf.int64))
            y = tf.compat.v1.data.make_one_shot_iterator(data).get_next()
        else:
            y = x + tf.compat.v1.placeholder_with_default([1.0, 2.0, 3.0], [None])
        session.run(y, {x: [1.0, 2.0]})


DIVISION = "ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.parametrize(
    ("where", "begin", "end"),
    [
        ("python", DIVISION, DIVISION),
        ("twice", DIVISION, DIVISION),
        ("dataset", "", DIVISION),
        (
            "shapes",
            "InvalidArgumentError: Incompatible shapes: [2] vs. [3]",
            "(operation 'add')",
        ),
    ],
)
def test_the_cause_of_an_error_of_tensorflow(where: str, begin: str, end: str) -> None:
    line = cause_of(raised(lambda: fail_in_tensorflow(where)))
    assert line.startswith(begin)
    assert line.endswith(end)


# -- what is printed -----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["python", "twice", "shapes"])
def test_messages_of_tensorflow_are_not_repeated(where: str) -> None:
    error = raised(lambda: fail_in_tensorflow(where))
    shown = summary_of(error, "rank 1", "a file")
    assert "Original stack trace" not in shown
    assert "During handling" not in shown
    assert shown.count("Detected at node") == 1
    defined_at = shown.partition("Detected at node")[2].partition("\nNode: ")[0]
    assert "in fail_in_tensorflow" in defined_at
    assert "/tensorflow/" not in defined_at
    assert shown.count("division or modulo") == (0 if where == "shapes" else 2)  # and its end
    if where != "shapes":
        assert "in divide\n    return value / (1 // 0)" in shown.replace("~", "").replace("^", "")
    whole = error_report.details_of(error)
    assert "Original stack trace" in whole
    assert "During handling of the above exception" in whole
