"""Metadata of calls, with a proof that the caller knows the token if the ring has one.

Each call carries the caller's `rank`, and the incarnations `from` of the caller and `to` of the
rank that is called. With a token it also carries `digest` and `proof`, and the answer carries a
`proof`. A caller that does not know the other's incarnation is refused with that incarnation as
challenge, and calls again. docs/wire.md has the details.

An observer is no rank: it asks for the status of a ring. It carries no `rank`, and a number that
it draws for this call as `from`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from hostopt.errors import AuthError
from hostopt.transport.grpc.ring import Peers
from hostopt.transport.security import Security

Metadata = tuple[tuple[str, str], ...]
Caller = dict[str, str]  # metadata of a call

_CALL, _ANSWER = "call", "answer"
_OBSERVER_CALL, _ANSWER_TO_OBSERVER = "call of an observer", "answer to an observer"
MAX_RANK_DIGITS = 9


class Claim(NamedTuple):
    """The rank that a caller claims to be."""

    rank: int  # -1 if it names none
    incarnation: str


@dataclass(eq=False)
class Authenticator:
    """Signs and checks the calls of one rank."""

    _peers: Peers
    _security: Security

    def call_metadata(
        self, peer: int, incarnation: str, method: str, request: bytes = b""
    ) -> Metadata:
        """Returns the metadata of a call to a peer; the request of a stream is empty."""
        rank, local = str(self._peers.rank), self._peers.incarnation
        metadata = (("rank", rank), ("from", local), ("to", incarnation))
        if not self._security.has_token:
            return metadata
        fields, digest = (_CALL, method, rank, str(peer), local, incarnation), _digest(request)
        proof = self._security.proof(*fields, body=digest.encode())
        return (*metadata, ("digest", digest), ("proof", proof))

    def check_answer(
        self, peer: int, incarnation: str, method: str, answer: bytes, metadata: Any
    ) -> None:
        """Raises an error unless an answer proves that the peer knows the token."""
        proof = read_metadata(metadata).get("proof", "")
        fields = (_ANSWER, method, str(peer), str(self._peers.rank))
        incarnations = (incarnation, self._peers.incarnation)
        if self._security.has_token and not self._security.is_proof(
            proof, *fields, *incarnations, body=answer
        ):
            raise self.auth_error(peer, "answers without knowing the token of this rank")

    def answer_metadata(self, method: str, caller: Caller, answer: bytes) -> Metadata:
        """Returns the trailing metadata of an answer."""
        if not self._security.has_token:
            return ()
        fields = self._answer_fields(method, caller)
        return (("proof", self._security.proof(*fields, body=answer)),)

    def _answer_fields(self, method: str, caller: Caller) -> tuple[str, ...]:
        ranks = str(self._peers.rank), caller.get("rank", "")
        return (_ANSWER, method, *ranks, self._peers.incarnation, caller.get("from", ""))

    def needs_challenge(self, caller: Caller) -> bool:
        """Returns True if a caller with a token does not know this rank's incarnation yet."""
        is_signed = self._security.has_token and "proof" in caller
        return is_signed and caller.get("to") != self._peers.incarnation

    def reason_to_refuse(self, method: str, caller: Caller) -> str | None:
        """Returns the reason to refuse a call before its request is read; None without one."""
        proof = caller.get("proof")
        if not self._security.has_token:
            return None if proof is None else "the caller has a token, and this rank has none"
        if proof is None:
            return "the caller has no token, and this rank has one"
        digest = caller.get("digest", "").encode()
        if self._security.is_proof(proof, *self._call_fields(method, caller), body=digest):
            return None
        return "the caller has another token"

    def _call_fields(self, method: str, caller: Caller) -> tuple[str, ...]:
        ranks = caller.get("rank", ""), str(self._peers.rank)
        return (_CALL, method, *ranks, caller.get("from", ""), self._peers.incarnation)

    def is_signed(self, caller: Caller, request: bytes) -> bool:
        """Returns True if the request of an accepted call is the one that was signed."""
        return not self._security.has_token or _digest(request) == caller.get("digest")

    def is_peer(self, claim: Claim) -> bool:
        """Returns True if the claim of an accepted call is true. A token has proved it."""
        incarnation = self._peers.incarnations.get(claim.rank)
        return self._security.has_token or claim.incarnation == incarnation

    def auth_error(self, rank: int, fault: str) -> AuthError:
        """Builds the error of a rank that may not be in the ring; `fault` is a predicate."""
        cluster = self._peers.cluster
        fault = f"{cluster.describe(rank)} {fault}"
        return AuthError(
            f"{fault}. Found by {cluster.describe(self._peers.rank)}. Give all ranks the same "
            "token, in token_file or HOSTOPT_TOKEN, and each a tls_dir with a valid certificate "
            "of the same CA, or none of them any",
            **cluster.attributes(rank),
            root_cause=fault,
        )


class ObserverAuthenticator(Authenticator):
    """Checks the calls of observers at one rank."""

    def _call_fields(self, method: str, caller: Caller) -> tuple[str, ...]:
        return (_OBSERVER_CALL, method, caller.get("from", ""), self._peers.incarnation)

    def _answer_fields(self, method: str, caller: Caller) -> tuple[str, ...]:
        return (_ANSWER_TO_OBSERVER, method, self._peers.incarnation, caller.get("from", ""))


@dataclass(eq=False)
class ObserverProofs:
    """Signs one call of an observer, by a random number, and checks the answer."""

    _security: Security
    _method: str
    _number: str

    def call_metadata(self, incarnation: str, request: bytes) -> Metadata:
        """Returns the metadata of a call to an incarnation; "" if it is unknown."""
        metadata = (("from", self._number), ("to", incarnation))
        if not self._security.has_token:
            return metadata
        fields = (_OBSERVER_CALL, self._method, self._number, incarnation)
        digest = _digest(request)
        proof = self._security.proof(*fields, body=digest.encode())
        return (*metadata, ("digest", digest), ("proof", proof))

    def is_answer(self, incarnation: str, answer: bytes, metadata: Any) -> bool:
        """Returns True if an answer proves that the rank knows the token, if there is one."""
        proof = read_metadata(metadata).get("proof", "")
        fields = (_ANSWER_TO_OBSERVER, self._method, incarnation, self._number)
        return not self._security.has_token or self._security.is_proof(proof, *fields, body=answer)


def read_metadata(metadata: Any) -> Caller:
    """Returns the texts of metadata by key; gRPC's own type is not always a dict."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def claim_of(caller: Caller) -> Claim:
    """Returns the claim in the metadata of a call."""
    rank = caller.get("rank", "")
    is_number = rank.isascii() and rank.isdigit() and len(rank) <= MAX_RANK_DIGITS
    return Claim(int(rank) if is_number else -1, caller.get("from", ""))


def _digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()
