"""Authenticates ranks: a rank accepts data only from ranks that share its secret.

Ranks communicate through sockets that gloo and torch's store listen on, and neither authenticates a client. So each
value in the store, and each object in a message, carries a MAC (keyed BLAKE2) that needs the secret. Ranks of one host
get the secret from rank 0 through a socket that identifies the user at the other end. Ranks of several hosts find it in
their environment; without one, they accept nothing but data from each other.
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

SECRET = "LIGHTNING_PIPES_SECRET"
"""The environment variable with the secret, the same for all processes of a run: any text that is hard to guess."""
_CODE_BYTES = 32
_POLL_SECONDS = 0.05
_EXCHANGE_SECONDS = 60.0
_TIMEOUT = timedelta(minutes=30)
_PEER = struct.Struct("3i")  # process, user and group at the other end of a socket
_SOCKET_KEY, _PROOF = "lightning_pipes/door", "lightning_pipes/proofs"
_SOCKET_PREFIX = "\0lightning_pipes-"
"""The prefix of our Unix sockets' names, which are abstract names, not files."""
_log = logging.getLogger(__name__)
_own_secret = ""
"""The secret that this process has created for its child processes."""


class ForgedError(PipelineError):
    """Data that no rank of this run has written."""


class Seal:
    """Creates and checks MACs with a shared secret."""

    def __init__(self, secret: bytes) -> None:
        self._keyed = hashlib.blake2b(key=secret, digest_size=_CODE_BYTES)  # OpenSSL's HMAC takes nine times as long

    def sign(self, data: bytes, name: str = "") -> bytes:
        """Return a MAC followed by the data; both belong to `name`."""
        return self._code(data, name) + data

    def open(self, signed: bytes | memoryview, name: str = "") -> bytes:
        """Return the data.

        Raises:
            ForgedError: the MAC is wrong.
        """
        data = bytes(signed[_CODE_BYTES:])
        if not hmac.compare_digest(bytes(signed[:_CODE_BYTES]), self._code(data, name)):
            raise ForgedError(f"{name or 'a message'} was not written by a rank that has this run's secret")
        return data

    def _code(self, data: bytes, name: str) -> bytes:
        code, key = self._keyed.copy(), name.encode()
        code.update(b"%d/%b" % (len(key), key))
        code.update(data)
        return code.digest()


class TrustedPeerSeal(Seal):
    """The seal for peers authenticated otherwise, such as by a socket that identifies its peer's user."""

    def __init__(self) -> None:
        super().__init__(b"")

    def sign(self, data: bytes, name: str = "") -> bytes:
        return data

    def open(self, signed: bytes | memoryview, name: str = "") -> bytes:
        return bytes(signed)


TRUSTED = TrustedPeerSeal()


def dumps(thing: Any, seal: Seal | None, aside: Any = None) -> bytes:
    """Return the bytes of an object; `aside` as for `plain.dumps`."""
    data = plain.dumps(thing, aside)
    return data if seal is None else seal.sign(data)


def loads(data: bytes | memoryview, seal: Seal | None, aside: Iterable[Any] = ()) -> Any:
    """Return the object of these bytes: any object sent with the secret, or else one that is data.

    Raises:
        ForgedError: it was not signed with the secret.
        NotPlainError: there is no secret, and it is not data.
    """
    if seal is not None:
        return pickle.loads(seal.open(data), buffers=aside)
    try:
        return plain.loads(data, aside)
    except plain.NotPlainError as error:
        raise plain.NotPlainError(
            f"another rank sent an object that can't be accepted without a secret: {error}; give all processes of the "
            f"run the "
            f"same {SECRET} in their environment, a long random text"
        ) from None


def to_printable(text: str) -> str:
    """Return the text without control characters for a terminal; line breaks stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class SignedStore(Store):
    """A store in which only values written by ranks of this run count. Other values are ignored, and named once in the
    log. Counts that `add` makes can't be signed.

    Attributes:
        seal: of the run.
    """

    def __init__(self, store: Any, seal: Seal, prefix: str = "") -> None:
        super().__init__()
        self.seal = seal
        self._store = store
        self._prefix = prefix
        self._clones: list[SignedStore] = []
        self._named: set[str] = set()

    def sub_store(self, prefix: str) -> SignedStore:
        """Return a part of the store, with a connection of its own."""
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
            time.sleep(_POLL_SECONDS)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

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
            before = found  # a stranger's value counts as missing
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

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def clone(self) -> SignedStore:
        made = SignedStore(self._store.clone(), self.seal, self._prefix)
        self._clones.append(made)  # torch may be the caller, and keeps only its own half of it
        return made

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - as torch calls them

    def _signed(self, name: str, value: str | bytes) -> bytes:
        return self.seal.sign(value.encode() if isinstance(value, str) else bytes(value), name)

    def _opened(self, name: str, value: bytes) -> bytes | None:
        try:
            return self.seal.open(value, name)
        except ForgedError:
            if name not in self._named:
                self._named.add(name)
                _log.warning("a process outside this run wrote %r into its store; the value is ignored", name)
            return None


def sub_store_of(store: Any, prefix: str) -> Any:
    """Return a part of any store, with a connection of its own."""
    return store.sub_store(prefix) if isinstance(store, SignedStore) else PrefixStore(prefix, store.clone())


def seal_of(store: Any) -> Seal | None:
    """Return the seal of data from ranks that use this store; None where there is none."""
    return store.seal if isinstance(store, SignedStore) else None


def secret_for_children() -> dict[str, str]:
    """Return the environment variables for child processes; this process keeps the secret to itself."""
    global _own_secret
    _own_secret = os.environ.get(SECRET) or _own_secret or secrets.token_hex(32)
    return {SECRET: _own_secret}


def seal_from_environment() -> Seal | None:
    """Return the seal of the secret in the environment; None where there is none."""
    text = os.environ.get(SECRET)
    return Seal(_secret(text)) if text else None


def _secret(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def seal_store(
    store: Any,
    rank: int,
    one_host: bool,
    size: int = 1,
    timeout: timedelta = _TIMEOUT,
    check: Callable[[], None] = lambda: None,
) -> Any:
    """Return the store, in which only values written by ranks count from now on, if they share a secret. Collective.

    Args:
        one_host: all ranks are on this host, and belong to one user.
        size: the number of ranks without a secret in their environment.
        timeout: how long the others wait for rank 0.
        check: called meanwhile; may raise.

    Raises:
        PipelineError: ranks have different secrets, or a stranger has written to the store.
    """

    def wait(key: str) -> bytes:
        until = time.monotonic() + timeout.total_seconds()
        while not store.check([key]):
            check()
            if time.monotonic() > until:
                raise TimeoutError(f"rank 0 did not connect within {timeout.total_seconds():.0f} s")
            time.sleep(_POLL_SECONDS)
        return bytes(store.get(key))

    text = os.environ.get(SECRET) or _own_secret
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
                SECRET,
            )
    _check_same(store, rank, secret, wait)
    return SignedStore(store, Seal(secret)) if secret else store


def _check_same(store: Any, rank: int, secret: bytes, wait: Callable[[str], bytes]) -> None:
    """Raise PipelineError if rank 0 has another secret."""
    proof = hmac.digest(secret, _PROOF.encode(), "sha256").hex()
    if rank == 0:
        store.set(_PROOF, proof)
    elif not hmac.compare_digest(wait(_PROOF), proof.encode()):
        raise PipelineError(
            f"rank {rank} and rank 0 have different secrets: set {SECRET} to the same text for the processes of all "
            "hosts, or for none"
        )


def _serve_secret(store: Any, size: int) -> bytes:
    """Create a secret, and serve it to each other rank that requests it."""
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
                except OSError:  # it has ended meanwhile
                    time.sleep(_POLL_SECONDS)

    threading.Thread(target=accept_ranks, name="lightning_pipes secret", daemon=True).start()
    store.set(_SOCKET_KEY, name)
    return secret


def _request_secret(store: Any, wait: Callable[[str], bytes]) -> bytes:
    """Return the secret of rank 0."""
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
                f"the same {SECRET} in their environment, a long random text"
            ) from error
    if len(secret) != 32:
        raise PipelineError("rank 0 has ended")
    return secret


def same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this process's user."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.getuid())
