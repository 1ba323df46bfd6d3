"""Authenticates ranks. A rank accepts data only from ranks that have the same secret.

Ranks communicate through sockets on which gloo and the store of torch listen, and neither of them authenticates its
clients. Each value in the store and each object in a message therefore carries a MAC (keyed BLAKE2), which can be
computed only with the secret. Ranks on one host get the secret from rank 0 through a socket that identifies the user of
the peer. Ranks on several hosts read it from their environment. Without a secret, they accept only plain data from each
other, and no other objects.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_pipes.engine.watch import plain
from lightning_pipes.ir import PipelineError

SECRET_VARIABLE = "LIGHTNING_PIPES_SECRET"
"""The environment variable that contains the secret, which is any text that is hard to guess. All processes of a run
need the same value."""
_CODE_BYTES = 32
_TRUST_POLL_SECONDS = 0.05
_EXCHANGE_SECONDS = 60.0
_TRUST_TIMEOUT = timedelta(minutes=30)
_PEER_FORMAT = struct.Struct("3i")  # IDs of the process, the user and the group at the other end of a socket
_SOCKET_KEY, _PROOF_KEY = "lightning_pipes/door", "lightning_pipes/proofs"
_SOCKET_PREFIX = "\0lightning_pipes-"
"""Prefix of the names of our Unix sockets. They are abstract names, which do not exist as files."""
MAX_LOGGED_KEYS = 100
"""Number of ignored keys that a store logs."""
_log = logging.getLogger(__name__)
_own_secret = ""
"""The secret that this process has created for its child processes."""


class ForgedError(PipelineError):
    """Raised for data that was not written by a rank of this run."""


class Seal:
    """Computes and verifies MACs with a shared secret."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = hashlib.blake2b(key=secret, digest_size=_CODE_BYTES)  # nine times as fast as OpenSSL's HMAC

    def sign(self, data: bytes, name: str = "") -> bytes:
        """Return a MAC followed by the data.

        Args:
            data: the bytes to sign.
            name: the name of the data, such as its key in the store. The MAC is valid only for this name.
        """
        return self._code(data, name) + data

    def open(self, signed: bytes | memoryview, name: str = "") -> bytes:
        """Verify the MAC of signed data, and return the data.

        Args:
            signed: a MAC followed by the data.
            name: the name that was passed to `sign`.

        Raises:
            ForgedError: the MAC is wrong.
        """
        data = bytes(signed[_CODE_BYTES:])
        if not hmac.compare_digest(bytes(signed[:_CODE_BYTES]), self._code(data, name)):
            raise ForgedError(
                f"{name or 'a message'} is not signed with the secret of this run, so none of its ranks has written it"
            )
        return data

    def _code(self, data: bytes, name: str) -> bytes:
        code, key = self._keyed.copy(), name.encode()
        code.update(b"%d/%b" % (len(key), key))
        code.update(data)
        return code.digest()


class TrustedPeerSeal(Seal):
    """A seal without MACs, for peers that are authenticated by other means.

    An example is a socket that identifies the user of the peer.
    """

    def __init__(self) -> None:
        super().__init__(b"")

    def sign(self, data: bytes, name: str = "") -> bytes:
        return data

    def open(self, signed: bytes | memoryview, name: str = "") -> bytes:
        return bytes(signed)


TRUSTED_SEAL = TrustedPeerSeal()


def dumps(thing: Any, seal: Seal | None, aside: Any = None) -> bytes:
    """Serialize an object, and sign it if there is a seal.

    Args:
        thing: the object to serialize.
        seal: signs the bytes. None returns them unsigned.
        aside: passed to `plain.dumps`.
    """
    data = plain.dumps(thing, aside)
    return data if seal is None else seal.sign(data)


def loads(data: bytes | memoryview, seal: Seal | None, aside: Iterable[Any] = ()) -> Any:
    """Deserialize an object.

    With a seal, any object is accepted, because only ranks with the secret can have sent it. Without a seal, only plain
    data is accepted.

    Args:
        data: the bytes that `dumps` returned.
        seal: verifies the bytes, or None.
        aside: the buffers that belong to the object, as in `plain.loads`.

    Raises:
        ForgedError: the object was not signed with the secret.
        NotPlainError: there is no secret, and the object is not plain data.
    """
    if seal is not None:
        return pickle.loads(seal.open(data), buffers=aside)
    try:
        return plain.loads(data, aside)
    except plain.NotPlainError as error:
        raise plain.NotPlainError(
            f"another rank sent an object that can't be accepted without a secret: {error}; give all processes of the "
            f"run the "
            f"same {SECRET_VARIABLE} in their environment, a long random text"
        ) from None


def to_printable(text: str) -> str:
    """Replace all control characters except line breaks and tabs, so that the text can be printed to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class SignedStore(Store):
    """A store that accepts only values written by ranks of this run.

    Other values are ignored, and the first of their keys are logged once each. The counters of `add` can't be signed.

    Attributes:
        seal: the seal of the run.
    """

    def __init__(self, store: Any, seal: Seal, prefix: str = "") -> None:
        super().__init__()
        self.seal = seal
        self._store = store
        self._prefix = prefix
        self._clones: list[SignedStore] = []
        self._named: set[str] = set()

    def sub_store(self, prefix: str) -> SignedStore:
        """Return a part of the store with a separate connection."""
        return SignedStore(self._store.clone(), self.seal, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        name = self._prefix + key
        self._store.set(name, self._signed(name, value))

    def get(self, key: str) -> bytes:
        name = self._prefix + key
        until = time.monotonic() + self._store.timeout.total_seconds()
        while True:
            found = self._opened(name, self._store.get(name))
            if found is not None:
                return found
            if time.monotonic() > until:
                raise ForgedError(f"{name} in the store of this run was not written by one of its ranks")
            time.sleep(_TRUST_POLL_SECONDS)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        names = [self._prefix + key for key in keys]
        if not self._store.check(names):
            return False
        return all(
            self._opened(n, value) is not None for n, value in zip(names, self._store.multi_get(names), strict=True)
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._prefix + key for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        name = self._prefix + key
        signed, before = self._signed(name, desired), self._signed(name, expected) if expected else b""
        while True:
            found = self._store.compare_set(name, before, signed)
            opened = b"" if not found else self._opened(name, found)
            if opened is not None:
                return opened
            before = found  # a value that is not signed counts as missing
            if expected:
                return bytes(expected) if isinstance(expected, bytes) else expected.encode()

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(self._prefix + key))

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SignedStore:
        made = SignedStore(self._store.clone(), self.seal, self._prefix)
        self._clones.append(made)  # if torch is the caller, it keeps only the C++ part of the store
        return made

    deleteKey = delete_key  # noqa: N815 - as torch calls it

    def _signed(self, name: str, value: str | bytes) -> bytes:
        return self.seal.sign(value.encode() if isinstance(value, str) else bytes(value), name)

    def _opened(self, name: str, value: bytes) -> bytes | None:
        try:
            return self.seal.open(value, name)
        except ForgedError:
            if name not in self._named and len(self._named) < MAX_LOGGED_KEYS:
                self._named.add(name)
                _log.warning("a process outside this run wrote %r into its store; the value is ignored", name)
            return None


def sub_store_of(store: Any, prefix: str) -> Any:
    """Return a part of any store with a separate connection."""
    return store.sub_store(prefix) if isinstance(store, SignedStore) else PrefixStore(prefix, store.clone())


def seal_of(store: Any) -> Seal | None:
    """Return the seal of a store, or None if the ranks that use the store do not share a secret."""
    return store.seal if isinstance(store, SignedStore) else None


def secret_for_children() -> dict[str, str]:
    """Return the environment variables that pass the secret to child processes.

    The environment of this process is not changed.
    """
    global _own_secret
    _own_secret = os.environ.get(SECRET_VARIABLE) or _own_secret or secrets.token_hex(32)
    return {SECRET_VARIABLE: _own_secret}


def seal_from_environment() -> Seal | None:
    """Return the seal for the secret in the environment, or None if the environment does not contain a secret."""
    text = os.environ.get(SECRET_VARIABLE)
    return Seal(_secret(text)) if text else None


def _secret(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def seal_store(
    store: Any,
    rank: int,
    one_host: bool,
    size: int = 1,
    timeout: timedelta = _TRUST_TIMEOUT,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Wrap a store so that only values written by ranks of this run are accepted.

    If the ranks do not share a secret, the store is returned unchanged. This is a collective call.

    Args:
        store: the store that all ranks use.
        rank: the global rank of this process.
        one_host: whether all ranks run on this host. Rank 0 then passes a new secret to the other ranks, which must
            belong to the same user.
        size: the number of ranks that get the secret in this way, including rank 0.
        timeout: how long the other ranks wait for rank 0.
        check: called repeatedly during the wait. It may raise an exception.

    Raises:
        PipelineError: ranks have different secrets, or another process has written to the store.
        TimeoutError: rank 0 did not connect in time.
    """

    def wait(key: str) -> bytes:
        until = time.monotonic() + timeout.total_seconds()
        while not store.check([key]):
            check()
            if time.monotonic() > until:
                raise TimeoutError(f"rank 0 did not connect within {timeout.total_seconds():.0f} s")
            time.sleep(_TRUST_POLL_SECONDS)
        return bytes(store.get(key))

    text = os.environ.get(SECRET_VARIABLE) or _own_secret
    if text:
        secret = _secret(text)
    elif one_host and sys.platform == "linux":
        return SignedStore(store, Seal(_serve_secret(store, size) if rank == 0 else _request_secret(store, wait)))
    else:
        secret = b""
        if rank == 0:
            _log.warning(
                "the ranks of this run are on several hosts and share no secret. Any process that reaches their "
                "ports can send them data, but not run code. Give all processes the same %s in their environment, a "
                "long random text",
                SECRET_VARIABLE,
            )
    _check_same(store, rank, secret, wait)
    return SignedStore(store, Seal(secret)) if secret else store


def _check_same(store: Any, rank: int, secret: bytes, wait: Callable[[str], bytes]) -> None:
    """Raise PipelineError if rank 0 has a different secret."""
    proof = hmac.digest(secret, _PROOF_KEY.encode(), "sha256").hex()
    if rank == 0:
        store.set(_PROOF_KEY, proof)
    elif not hmac.compare_digest(wait(_PROOF_KEY), proof.encode()):
        raise PipelineError(
            f"rank {rank} and rank 0 have different secrets: set {SECRET_VARIABLE} to the same text for the processes "
            "of all hosts, or for none"
        )


def _serve_secret(store: Any, size: int) -> bytes:
    """Create a secret, and send it to each other rank that connects."""
    secret = secrets.token_bytes(32)
    name = f"{_SOCKET_PREFIX}{secrets.token_hex(16)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(name)
    door.listen(64)

    def accept_ranks() -> None:
        left = size - 1
        with door:
            while left:
                try:
                    connection, _ = door.accept()
                    with connection:
                        if same_user(connection):
                            connection.sendall(secret)
                            left -= 1
                except OSError:  # the peer may have ended
                    time.sleep(_TRUST_POLL_SECONDS)

    threading.Thread(target=accept_ranks, name="lightning_pipes secret", daemon=True).start()
    store.set(_SOCKET_KEY, name)
    return secret


def _request_secret(store: Any, wait: Callable[[str], bytes]) -> bytes:
    """Request the secret from rank 0."""
    name = wait(_SOCKET_KEY).decode(errors="replace")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_EXCHANGE_SECONDS)
        try:
            if name.startswith(_SOCKET_PREFIX):
                connection.connect(name)
            if not name.startswith(_SOCKET_PREFIX) or not same_user(connection):
                raise ForgedError("another user answers")
            secret = connection.recv(32, socket.MSG_WAITALL)
        except (OSError, ForgedError) as error:
            raise PipelineError(
                f"rank 0 does not answer with the secret of this run ({error}). Another user wrote into the run's "
                f"store, or the processes are in different containers or belong to different users. Give all of them "
                f"the same {SECRET_VARIABLE} in their environment, a long random text"
            ) from error
    if len(secret) != 32:
        raise PipelineError("rank 0 has ended")
    return secret


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to the user of this process."""
    _, uid, _ = _PEER_FORMAT.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_FORMAT.size))
    return bool(uid == os.getuid())
