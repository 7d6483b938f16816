"""Metadata of calls: signatures and their checks, challenges, and claims."""

from __future__ import annotations

from typing import Any

import pytest

from hostopt.cluster.cluster import Cluster
from hostopt.errors import AuthError
from hostopt.options import Options
from hostopt.transport.grpc.authentication import (
    Authenticator,
    Claim,
    ObserverAuthenticator,
    ObserverProofs,
    claim_of,
)
from hostopt.transport.grpc.ring import Peers
from hostopt.transport.security import Security

JOBS = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
TOKEN, OTHER_TOKEN = "flour", "water"


def rank(number: int, token: str | None) -> tuple[Authenticator, Peers]:
    cluster = Cluster.from_dict(JOBS, "worker", number)
    environ = {} if token is None else {"HOSTOPT_TOKEN": token}
    peers = Peers(cluster)
    return Authenticator(peers, Security(cluster, Options(), environ)), peers


def call(
    caller_token: str | None, token: str | None, **changes: str
) -> tuple[bool, str | None, dict[str, str]]:
    """Returns whether rank 1 challenges a call of rank 0, its reason to refuse, the metadata."""
    caller, _ = rank(0, caller_token)
    called, peers = rank(1, token)
    metadata = dict(caller.call_metadata(1, peers.incarnation, "Status", b"{}"))
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
    metadata = dict(caller.call_metadata(1, peers.incarnation, "Status", b"{}"))
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
    if fault is None:
        caller.check_answer(1, called_peers.incarnation, "Status", answer, proof)
        return
    with pytest.raises(AuthError, match="answers without knowing the token") as caught:
        caller.check_answer(1, called_peers.incarnation, "Status", answer, proof)
    assert caught.value.rank == 1


def test_without_a_token_an_answer_needs_no_proof() -> None:
    caller, _ = rank(0, None)
    called, _ = rank(1, None)
    assert called.answer_metadata("Status", {}, b"{}") == ()
    caller.check_answer(1, "77", "Status", b"{}", None)


def test_claims() -> None:
    assert claim_of({"rank": "1", "from": "77"}) == Claim(1, "77")
    for text in ("", "one", "-1", "1" * 10, "٣"):
        assert claim_of({"rank": text}) == Claim(-1, "")


def test_a_claim_without_a_token_must_name_the_connected_incarnation() -> None:
    authenticator, peers = rank(0, None)
    peers.incarnations[1] = "77"
    assert authenticator.is_peer(Claim(1, "77"))
    assert not authenticator.is_peer(Claim(1, "78"))
    with_token, _ = rank(0, TOKEN)
    assert with_token.is_peer(Claim(1, "78"))


# --- observers --------------------------------------------------------------------------------


def security(token: str | None) -> Security:
    environ = {} if token is None else {"HOSTOPT_TOKEN": token}
    return Security(Cluster.local(), Options(), environ)


def observed(token: str | None) -> tuple[ObserverAuthenticator, Peers]:
    peers = Peers(Cluster.from_dict(JOBS, "worker", 1))
    return ObserverAuthenticator(peers, security(token)), peers


@pytest.mark.parametrize("token", [None, TOKEN])
def test_an_observer_with_the_same_token_is_accepted(token: str | None) -> None:
    called, peers = observed(token)
    proofs = ObserverProofs(security(token), "Observe", "77")
    assert called.needs_challenge(dict(proofs.call_metadata("", b""))) == (token is not None)
    metadata = dict(proofs.call_metadata(peers.incarnation, b""))
    assert not called.needs_challenge(metadata)
    assert called.reason_to_refuse("Observe", metadata) is None
    assert called.is_signed(metadata, b"")
    answer = called.answer_metadata("Observe", metadata, b"{}")
    assert proofs.is_answer(peers.incarnation, b"{}", answer)
    if token is not None:
        assert not called.is_signed(metadata, b"{}")
        assert not proofs.is_answer(peers.incarnation, b"{ }", answer)
        assert not proofs.is_answer("78", b"{}", answer)
        assert not proofs.is_answer(peers.incarnation, b"{}", None)
        later = ObserverProofs(security(token), "Observe", "78")
        assert not later.is_answer(peers.incarnation, b"{}", answer)


@MISMATCHES
def test_an_observer_with_another_token_is_refused(
    caller_token: str | None, token: str | None, reason: str
) -> None:
    called, peers = observed(token)
    proofs = ObserverProofs(security(caller_token), "Observe", "77")
    metadata = dict(proofs.call_metadata(peers.incarnation, b""))
    assert called.reason_to_refuse("Observe", metadata) == reason


def test_a_proof_of_an_observer_is_for_its_method_and_incarnation_only() -> None:
    called, peers = observed(TOKEN)
    proofs = ObserverProofs(security(TOKEN), "Observe", "77")
    metadata = dict(proofs.call_metadata(peers.incarnation, b""))
    refused = "the caller has another token"
    assert called.reason_to_refuse("Other", metadata) == refused
    assert called.reason_to_refuse("Observe", {**metadata, "from": "78"}) == refused
    restarted, _ = observed(TOKEN)
    assert restarted.needs_challenge(metadata)
    assert restarted.reason_to_refuse("Observe", metadata) == refused


def test_ranks_and_observers_have_different_proofs() -> None:
    observers, peers = observed(TOKEN)
    ranks = Authenticator(peers, security(TOKEN))
    proofs = ObserverProofs(security(TOKEN), "Status", "77")
    as_observer = dict(proofs.call_metadata(peers.incarnation, b""))
    assert ranks.reason_to_refuse("Status", as_observer) == "the caller has another token"
    caller, _ = rank(0, TOKEN)
    as_rank = dict(caller.call_metadata(1, peers.incarnation, "Observe"))
    assert observers.reason_to_refuse("Observe", as_rank) == "the caller has another token"
    answer = ranks.answer_metadata("Status", as_observer, b"{}")
    assert not proofs.is_answer(peers.incarnation, b"{}", answer)
