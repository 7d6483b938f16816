"""Error classes: exit codes, the tree in the docstring and the conversion to JSON."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from rings import Spawn

from hostopt import errors
from hostopt.collectives.communicator import Communicator
from hostopt.errors import HostOptError
from hostopt.transport.grpc.limits import most_note_bytes

CLASSES = {
    name: class_
    for name, class_ in vars(errors).items()
    if inspect.isclass(class_) and class_.__module__ == errors.__name__
}
EXIT_CODES = {
    "HostOptError": 70,
    "CollectiveMismatchError": 65,
    "CheckpointError": 74,
    "ProtocolError": 76,
    "AuthError": 77,
    "ConfigError": 78,
    "NonFiniteGradientError": 79,
    "PeerLostError": 200,
    "ResourceError": 203,
    "CollectiveTimeoutError": 201,
    "RendezvousTimeoutError": 202,
}
RETRYABLE = [name for name, code in EXIT_CODES.items() if code >= 193] + ["RetryableError"]
ATTRIBUTES = ["rank", "task", "address", "step", "bucket", "root_cause", "last_checkpoint"]


def test_exit_codes() -> None:
    assert {name: vars(class_).get("exit_code") for name, class_ in CLASSES.items()} == {
        **EXIT_CODES,
        "RetryableError": None,
    }


def test_only_retryable_errors_have_retryable_codes() -> None:
    for name, code in EXIT_CODES.items():
        retryable = issubclass(CLASSES[name], errors.RetryableError)
        assert retryable == (code >= 193), name
        assert retryable or code < 128, name


def test_the_tree_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, tuple[str, int | None]] = {}
    above: list[tuple[int, str]] = [(-1, "RuntimeError")]
    for line in errors.__doc__.splitlines():
        result = re.match(r"(.*)[├└]── (\w+) +(?:exit code )?(\d+|\(none)", line)
        if result is None:
            assert "──" not in line, line
            continue
        indent, name, code = len(result[1]), result[2], result[3]
        while above[-1][0] >= indent:
            above.pop()
        drawn[name] = (above[-1][1], int(code) if code.isdigit() else None)
        above.append((indent, name))
    assert drawn == {
        name: (class_.__base__.__name__, vars(class_).get("exit_code"))
        for name, class_ in CLASSES.items()
    }
    assert re.search(r"^ *RuntimeError$", errors.__doc__, re.MULTILINE)


@pytest.mark.parametrize("name", CLASSES)
def test_attributes(name: str) -> None:
    attributes = {attribute: object() for attribute in ATTRIBUTES}
    error = CLASSES[name]("what to do", **attributes)
    assert isinstance(error, HostOptError)
    assert isinstance(error, RuntimeError)
    assert str(error) == "what to do"
    assert {attribute: getattr(error, attribute) for attribute in ATTRIBUTES} == attributes
    bare = CLASSES[name]("what to do")
    assert {getattr(bare, attribute) for attribute in ATTRIBUTES} == {None}


@pytest.mark.parametrize("name", CLASSES)
def test_the_message_names_the_checkpoint_to_resume_from_once(name: str) -> None:
    error = CLASSES[name]("rank 1 is lost")
    again = "Re-run the same command to resume." if name in RETRYABLE else ""
    error.resume_from(None)
    assert str(error) == (f"rank 1 is lost. {again}" if again else "rank 1 is lost")
    error.resume_from("/models/model.ckpt-4")
    for _ in range(2):
        assert str(error) == f"rank 1 is lost. Newest intact checkpoint: step 4. {again}".strip()
        error.resume_from(None)
    assert error.last_checkpoint == "/models/model.ckpt-4"


def test_the_error_sent_to_other_ranks_does_not_name_the_checkpoint() -> None:
    error = errors.PeerLostError("rank 1 is lost", rank=1)
    error.resume_from("/models/model.ckpt-4")
    there = errors.error_from_dict(errors.error_to_dict(error))
    assert str(there) == "rank 1 is lost"
    assert (there.rank, there.last_checkpoint) == (1, "/models/model.ckpt-4")


LONG = 20_000


@pytest.mark.parametrize("character", ["a", "ä", "漢", "😀", '"', "\0", "\ud800"])
def test_the_longest_error_fits_into_a_message(character: str) -> None:
    text = LONG * character
    attributes = dict.fromkeys(("task", "address", "root_cause", "last_checkpoint"), text)
    note = errors.error_to_dict(errors.PeerLostError(text, rank=1, step=1, bucket=1, **attributes))
    assert (
        len(json.dumps(note)) < most_note_bytes(2) * 3 // 4
    )  # a Status message has additional fields
    there = errors.error_from_dict(json.loads(json.dumps(note)))
    assert text.startswith(there.message)
    for name in attributes:
        assert text.startswith(getattr(there, name))
        assert 12 * len(getattr(there, name)) >= 5_900
    assert 12 * len(there.message) >= 19_900


def test_a_short_text_is_sent_unchanged() -> None:
    error = HostOptError("a" * 10_000, root_cause="漢" * 900, task="")
    there = errors.error_from_dict(errors.error_to_dict(error))
    assert (there.message, there.root_cause) == (error.message, error.root_cause)
    assert (there.task, there.address) == ("", None)


def test_peers_receive_the_longest_error(spawn_grpc: Spawn) -> None:
    def fn(communicator: Communicator) -> str:
        communicator.barrier()  # so that no rank is still connecting
        if communicator.rank == 0:
            communicator.abort(errors.ConfigError("漢" * LONG, root_cause="漢" * LONG))
            return "漢" * 100
        with pytest.raises(errors.ConfigError) as caught:
            communicator.barrier()
        return str(caught.value.root_cause)

    sent, received = spawn_grpc(2, fn)
    assert received.startswith(sent)
