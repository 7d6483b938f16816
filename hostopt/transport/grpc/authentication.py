"""Metadata of calls, with a proof that the caller knows the token if the ring has one.

docs/wire.md has the fields. A caller that does not know the other's incarnation is refused with
that incarnation as challenge, and calls again. An observer is no rank: it carries no `rank`, and a
number that it draws for this call as `from`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from hostopt.transport.security import Identity, Security

Metadata = tuple[tuple[str, str], ...]
Caller = dict[str, str]  # metadata of a call

_CALL, _ANSWER = "call", "answer"
_FOR_OBSERVERS = {_CALL: "call of an observer", _ANSWER: "answer to an observer"}
MAX_RANK_DIGITS = 9


@dataclass(frozen=True)
class Authenticator:
    """Signs and checks the calls and answers of one side, those of ranks or those of observers.

    The proofs of the two are of different kinds, so neither is accepted in place of the other.
    """

    _local: Identity
    _security: Security
    _for_observers: bool = False

    def call_metadata(self, called: Identity, method: str, request: bytes = b"") -> Metadata:
        """Returns the metadata of a call to a rank; the request of a stream is empty."""
        metadata: Metadata = (("from", self._local.incarnation), ("to", called.incarnation))
        if not self._for_observers:
            metadata = (("rank", str(self._local.rank)), *metadata)
        if not self._security.has_token:
            return metadata
        fields, digest = self._fields(_CALL, method, self._local, called), _digest(request)
        proof = self._security.proof(*fields, body=digest.encode())
        return (*metadata, ("digest", digest), ("proof", proof))

    def is_answer(self, called: Identity, method: str, answer: bytes, metadata: Any) -> bool:
        """Returns True if an answer proves that the rank knows the token, if there is one."""
        proof = read_metadata(metadata).get("proof", "").encode()
        fields = self._fields(_ANSWER, method, called, self._local)
        return not self._security.has_token or self._security.is_proof(proof, *fields, body=answer)

    def answer_metadata(self, method: str, caller: Caller, answer: bytes) -> Metadata:
        """Returns the trailing metadata of an answer."""
        if not self._security.has_token:
            return ()
        fields = self._fields(_ANSWER, method, self._local, claim_of(caller))
        return (("proof", self._security.proof(*fields, body=answer)),)

    def needs_challenge(self, caller: Caller) -> bool:
        """Returns True if a caller with a token does not know this rank's incarnation yet."""
        is_signed = self._security.has_token and "proof" in caller
        return is_signed and caller.get("to") != self._local.incarnation

    def reason_to_refuse(self, method: str, caller: Caller) -> str | None:
        """Returns the reason to refuse a call before its request is read; None without one."""
        proof = caller.get("proof")
        if not self._security.has_token:
            return None if proof is None else "the caller has a token, and this rank has none"
        if proof is None:
            return "the caller has no token, and this rank has one"
        fields = self._fields(_CALL, method, claim_of(caller), self._local)
        digest = caller.get("digest", "").encode()
        if self._security.is_proof(proof.encode(), *fields, body=digest):
            return None
        return "the caller has another token"

    def is_signed(self, caller: Caller, request: bytes) -> bool:
        """Returns True if the request of an accepted call is the one that was signed."""
        return not self._security.has_token or _digest(request) == caller.get("digest")

    def _fields(
        self, kind: str, method: str, sender: Identity, receiver: Identity
    ) -> tuple[str, ...]:
        incarnations = sender.incarnation, receiver.incarnation
        if self._for_observers:
            return (_FOR_OBSERVERS[kind], method, *incarnations)
        return (kind, method, str(sender.rank), str(receiver.rank), *incarnations)


def read_metadata(metadata: Any) -> Caller:
    """Returns the texts of metadata by key; gRPC's own type is not always a dict."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def claim_of(caller: Caller) -> Identity:
    """Returns who a caller claims to be; its rank is -1 if it names none."""
    rank = caller.get("rank", "")
    is_number = rank.isascii() and rank.isdigit() and len(rank) <= MAX_RANK_DIGITS
    return Identity(int(rank) if is_number else -1, caller.get("from", ""))


def _digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()
