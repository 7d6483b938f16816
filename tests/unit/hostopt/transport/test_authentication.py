"""Metadata of calls: signatures and their checks, challenges, and claims."""

from __future__ import annotations

from typing import Any

import pytest

from hostopt.cluster.cluster import Cluster
from hostopt.options import Options
from hostopt.transport.grpc.ring import DEFAULT, Peers, Ring
from hostopt.transport.security import Authenticator, Identity, Security, claim_of

JOBS = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
TOKEN, OTHER_TOKEN = "flour", "water"


def rank(number: int, token: str | None) -> tuple[Authenticator, Peers]:
    cluster = Cluster.from_dict(JOBS, "worker", number)
    environ = {} if token is None else {"HOSTOPT_TOKEN": token}
    peers = Peers(cluster)
    return Authenticator(peers.local, Security(cluster, Options(), environ)), peers


def call(
    caller_token: str | None, token: str | None, **changes: str
) -> tuple[bool, str | None, dict[str, str]]:
    """Returns whether rank 1 challenges a call of rank 0, its reason to refuse, the metadata."""
    caller, _ = rank(0, caller_token)
    called, peers = rank(1, token)
    metadata = dict(caller.call_metadata(peers.local, "Status", b"{}"))
    metadata.update(changes)
    return called.needs_challenge(metadata), called.reason_to_refuse("Status", metadata), metadata


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_call_with_the_same_token_is_accepted(token: str | None) -> None:
    challenge, reason, _ = call(token, token)
    assert not challenge
    assert reason is None


MISMATCHES = pytest.mark.parametrize(
    ("caller_token", "token", "reason"),
    [
        (None, TOKEN, "the caller has no token, and this rank has one"),
        (TOKEN, None, "the caller has a token, and this rank has none"),
        (OTHER_TOKEN, TOKEN, "the caller has another token"),
    ],
)


@MISMATCHES
def test_another_token_is_refused(
    caller_token: str | None, token: str | None, reason: str
) -> None:
    assert call(caller_token, token)[:2] == (False, reason)


@pytest.mark.parametrize("field", ["rank", "from", "digest", "proof"])
def test_changed_metadata_is_refused(field: str) -> None:
    assert call(TOKEN, TOKEN, **{field: "7"})[1] == "the caller has another token"


def test_a_call_to_another_incarnation_is_challenged() -> None:
    assert call(TOKEN, TOKEN, to="")[0]
    assert call(TOKEN, TOKEN, to="77")[0]
    assert not call(None, None, to="77")[0]


def test_a_call_is_for_one_method() -> None:
    caller, _ = rank(0, TOKEN)
    called, peers = rank(1, TOKEN)
    metadata = dict(caller.call_metadata(peers.local, "Status", b"{}"))
    assert called.reason_to_refuse("Leave", metadata) == "the caller has another token"


def test_the_request_is_signed() -> None:
    _, _, metadata = call(TOKEN, TOKEN)
    called, _ = rank(1, TOKEN)
    assert called.is_signed(metadata, b"{}")
    assert not called.is_signed(metadata, b"{ }")


@pytest.mark.parametrize("fault", ["no proof", "another answer", "another token", None])
def test_answers(fault: str | None) -> None:
    caller, peers = rank(0, TOKEN)
    called, called_peers = rank(1, OTHER_TOKEN if fault == "another token" else TOKEN)
    metadata = {"rank": "0", "from": peers.incarnation}
    proof: Any = called.answer_metadata("Status", metadata, b"{}")
    answer = b"{ }" if fault == "another answer" else b"{}"
    if fault == "no proof":
        proof = None
    assert caller.is_answer(called_peers.local, "Status", answer, proof) == (fault is None)


def test_without_a_token_an_answer_needs_no_proof() -> None:
    caller, _ = rank(0, None)
    called, _ = rank(1, None)
    assert called.answer_metadata("Status", {}, b"{}") == ()
    assert caller.is_answer(Identity(1, "77"), "Status", b"{}", None)


def test_claims() -> None:
    assert claim_of({"rank": "1", "from": "77"}) == Identity(1, "77")
    for text in ("", "one", "-1", "1" * 10, "٣"):
        assert claim_of({"rank": text}) == Identity(-1, "")


def test_a_claim_without_a_token_must_name_the_connected_incarnation() -> None:
    def ring(token: str | None) -> Ring:
        peers, unused = Peers(Cluster.from_dict(JOBS, "worker", 0)), Any
        peers.incarnations[1] = "77"
        return Ring(peers, Options(), security(token), DEFAULT, unused, unused)

    assert ring(None).is_peer(Identity(1, "77"))
    assert not ring(None).is_peer(Identity(1, "78"))
    assert ring(TOKEN).is_peer(Identity(1, "78"))


# --- observers --------------------------------------------------------------------------------


def security(token: str | None) -> Security:
    environ = {} if token is None else {"HOSTOPT_TOKEN": token}
    return Security(Cluster.local(), Options(), environ)


def observed(token: str | None) -> tuple[Authenticator, Identity]:
    local = Peers(Cluster.from_dict(JOBS, "worker", 1)).local
    return Authenticator(local, security(token), True), local


def observer(token: str | None, number: str = "77") -> Authenticator:
    return Authenticator(Identity(-1, number), security(token), True)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_an_observer_with_the_same_token_is_accepted(token: str | None) -> None:
    called, local = observed(token)
    caller = observer(token)
    unknown = Identity(-1, "")
    assert called.needs_challenge(dict(caller.call_metadata(unknown, "Observe"))) == (
        token is not None
    )
    metadata = dict(caller.call_metadata(local, "Observe", b""))
    assert "rank" not in metadata
    assert not called.needs_challenge(metadata)
    assert called.reason_to_refuse("Observe", metadata) is None
    assert called.is_signed(metadata, b"")
    answer = called.answer_metadata("Observe", metadata, b"{}")
    assert caller.is_answer(local, "Observe", b"{}", answer)
    if token is not None:
        assert not called.is_signed(metadata, b"{}")
        assert not caller.is_answer(local, "Observe", b"{ }", answer)
        assert not caller.is_answer(Identity(-1, "78"), "Observe", b"{}", answer)
        assert not caller.is_answer(local, "Observe", b"{}", None)
        assert not observer(token, "78").is_answer(local, "Observe", b"{}", answer)


@MISMATCHES
def test_an_observer_with_another_token_is_refused(
    caller_token: str | None, token: str | None, reason: str
) -> None:
    called, local = observed(token)
    metadata = dict(observer(caller_token).call_metadata(local, "Observe"))
    assert called.reason_to_refuse("Observe", metadata) == reason


def test_a_proof_of_an_observer_is_for_its_method_and_incarnation_only() -> None:
    called, local = observed(TOKEN)
    metadata = dict(observer(TOKEN).call_metadata(local, "Observe"))
    refused = "the caller has another token"
    assert called.reason_to_refuse("Other", metadata) == refused
    assert called.reason_to_refuse("Observe", {**metadata, "from": "78"}) == refused
    restarted, _ = observed(TOKEN)
    assert restarted.needs_challenge(metadata)
    assert restarted.reason_to_refuse("Observe", metadata) == refused


def test_ranks_and_observers_have_different_proofs() -> None:
    observers, local = observed(TOKEN)
    ranks = Authenticator(local, security(TOKEN))
    as_observer = dict(observer(TOKEN).call_metadata(local, "Status"))
    assert ranks.reason_to_refuse("Status", as_observer) == "the caller has another token"
    caller, _ = rank(0, TOKEN)
    as_rank = dict(caller.call_metadata(local, "Observe"))
    assert observers.reason_to_refuse("Observe", as_rank) == "the caller has another token"
    answer = ranks.answer_metadata("Status", as_observer, b"{}")
    assert not observer(TOKEN).is_answer(local, "Status", b"{}", answer)
