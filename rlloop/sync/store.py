"""Stores of versions: immutable blobs named by their hashes, and one head that changes by compare-and-swap.

    FolderStore(path)              a local folder, shared memory or a network file system
    FsspecStore("s3://bucket/p")   any fsspec file system that can create a file exclusively (S3, GCS, local, memory)
    HttpStore("https://relay/w")   read-only, from `rlloop serve relay|trainer` or any file server

Receivers verify a blob by its name, so no store or relay has to be trusted.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import httpx

from rlloop.errors import ConfigError, SyncError
from rlloop.sync.manifest import MAX_HEAD, MAX_MANIFEST, Refused, hash_of
from rlloop.web.clients import client, refuse_login

BLOCK = 1 << 20  # bytes read at a time
READ_ONLY = "a store over HTTP is read-only; publish to the folder or object store behind it"


class StoreError(SyncError):
    """The store failed: unreachable, full, or without the blob. The operation may be tried again."""


class Missing(StoreError):
    """The store has no such blob: it was never published, or has been collected."""


class Conflict(SyncError):
    """Another publisher has moved the head since it was read."""


class Store(Protocol):
    """Replicas need `latest`, `get`, `has` and `squash`; publishers the rest."""

    def latest(self) -> bytes | None:
        """The head; None if nothing was ever published."""
        ...

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        """The blob's bytes from offset `start`, in parts, not verified. Raises `StoreError`, perhaps half-way."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def put(self, blob: bytes) -> bytes:
        """Store a blob durably. Returns its hash."""
        ...

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        """Replace the head by `new` if it is `expected` (None: there is none); else raise `Conflict`."""
        ...

    def blobs(self) -> Iterator[bytes]:
        """Hashes of all blobs."""
        ...

    def delete(self, digest: bytes) -> None: ...

    def squash(self, sequence: int) -> bool:
        """Ask the publisher for one delta from version `sequence` to the newest. True if the head now lists it."""
        ...


def fetch(store: Store, digest: bytes, size: int | None = None, *, limit: int, attempts: int = 3) -> bytes:
    """A whole blob, verified. A broken transfer resumes where it broke; a damaged one starts over.

    `size`: its exact size in bytes, if known; `limit`: size above which it is refused unread. Raises `StoreError` or
    `Refused` after `attempts`, `Missing` at once.
    """
    bound = limit if size is None else min(size, limit)
    content, failure = bytearray(), SyncError("")
    for _ in range(attempts):
        try:
            for chunk in store.get(digest, len(content)):
                content += chunk
                if len(content) > bound:
                    raise Refused(f"blob {digest.hex()[:16]} is larger than {bound} bytes")
        except Missing:
            raise
        except StoreError as error:
            failure = error
            continue
        except Refused as error:
            failure, content = error, bytearray()
            continue
        if hash_of(content) == digest and (size is None or len(content) == size):
            return bytes(content)
        failure, content = Refused(f"blob {digest.hex()[:16]} arrived damaged ({len(content)} bytes)"), bytearray()
    raise failure


class FolderStore:
    """A store in a folder: `path`/blobs/ab/abcd... and `path`/latest. Files are complete or absent, even if killed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def latest(self) -> bytes | None:
        try:
            return (self.path / "latest").read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:  # such as a network file system that is unreachable for a while
            raise StoreError(f"{self.path}: {error}") from error

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        try:
            with self._path_of(digest).open("rb") as file:
                file.seek(start)
                while chunk := file.read(BLOCK):
                    yield chunk
        except FileNotFoundError:
            raise Missing(f"{self.path} has no blob {digest.hex()}") from None
        except OSError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def has(self, digest: bytes) -> bool:
        return self._path_of(digest).is_file()

    def put(self, blob: bytes) -> bytes:
        digest = hash_of(blob)
        if not self.has(digest):
            self._write(self._path_of(digest), blob)
        return digest

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._lock():
                if self.latest() != expected:
                    raise Conflict(f"{self.path}/latest was moved by another publisher")
                self._write(self.path / "latest", new)
        except OSError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def blobs(self) -> Iterator[bytes]:
        for file in sorted((self.path / "blobs").glob("??/" + "?" * 64)):
            yield bytes.fromhex(file.name)

    def delete(self, digest: bytes) -> None:
        try:
            self._path_of(digest).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def squash(self, sequence: int) -> bool:
        return False  # no publisher can be asked

    def _path_of(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.path / "blobs" / name[:2] / name

    def _write(self, target: Path, content: bytes) -> None:
        """Write to a temporary name, rename, and force file and folder to the disk."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(prefix="partial_", dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                Path(partial).replace(target)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise StoreError(f"{target} could not be written: {error}") from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.path / "latest.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class FsspecStore:
    """A store on any fsspec file system. The head is the file `heads/N` of the highest N, created exclusively: the
    compare-and-swap of file systems that have no other."""

    def __init__(self, url: str, **options: Any) -> None:
        """`options` go to the file system: `key`, `secret`, `endpoint_url` and so on for S3."""
        try:
            import fsspec
        except ImportError:
            raise ConfigError(f"the store {url!r} needs fsspec: pip install 'rlloop[stores]'") from None
        try:
            self._files, self.path = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"fsspec cannot open the store {url!r}: {error}") from None
        self.url = url

    def latest(self) -> bytes | None:
        numbers = self._heads()
        return self._read(self._head(numbers[-1])) if numbers else None

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        yield self._read(self._path_of(digest), start)

    def has(self, digest: bytes) -> bool:
        with _translated(self.url):
            return self._files.exists(self._path_of(digest))

    def put(self, blob: bytes) -> bytes:
        digest = hash_of(blob)
        with _translated(self.url):
            self._files.makedirs(f"{self.path}/blobs", exist_ok=True)
            self._files.pipe_file(self._path_of(digest), blob)
        return digest

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        numbers = self._heads()
        if (self._read(self._head(numbers[-1])) if numbers else None) != expected:
            raise Conflict(f"the head of {self.url} was moved by another publisher")
        following = numbers[-1] + 1 if numbers else 0
        with _translated(self.url):
            self._files.makedirs(f"{self.path}/heads", exist_ok=True)
            try:
                self._files.pipe_file(self._head(following), new, mode="create")
            except FileExistsError:
                raise Conflict(f"the head of {self.url} was moved by another publisher") from None
            for old in numbers[:-2]:  # a reader may be about to open one of the last two
                with suppress(Exception):  # the head has moved; the next publication tries again
                    self._files.rm_file(self._head(old))

    def blobs(self) -> Iterator[bytes]:
        yield from map(bytes.fromhex, self._names("blobs"))

    def delete(self, digest: bytes) -> None:
        with _translated(self.url):
            self._files.rm_file(self._path_of(digest))

    def squash(self, sequence: int) -> bool:
        return False  # no publisher can be asked

    def _heads(self) -> list[int]:
        return sorted(int(name) for name in self._names("heads"))

    def _names(self, folder: str) -> list[str]:
        with _translated(self.url):
            self._files.invalidate_cache()
            try:
                return [path.rpartition("/")[2] for path in self._files.ls(f"{self.path}/{folder}", detail=False)]
            except FileNotFoundError:
                return []

    def _head(self, number: int) -> str:
        return f"{self.path}/heads/{number:012}"

    def _path_of(self, digest: bytes) -> str:
        return f"{self.path}/blobs/{digest.hex()}"

    def _read(self, path: str, start: int = 0) -> bytes:
        with _translated(self.url):
            try:
                return self._files.cat_file(path, start=start)
            except FileNotFoundError:
                raise Missing(f"{self.url} has no {path}") from None


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except (SyncError, FileExistsError):
        raise
    except Exception as error:  # each backend has its own errors: OSError, botocore's, aiohttp's
        raise StoreError(f"{url}: {error or type(error).__name__}") from error


class ReadOnly:
    """The methods of `Store` that only publishers call, refused: for stores over HTTP, and relays."""

    def put(self, blob: bytes) -> bytes:
        raise ConfigError(READ_ONLY)

    def swap_latest(self, expected: bytes | None, new: bytes) -> None:
        raise ConfigError(READ_ONLY)

    def blobs(self) -> Iterator[bytes]:
        raise ConfigError(READ_ONLY)

    def delete(self, digest: bytes) -> None:
        raise ConfigError(READ_ONLY)


class HttpStore(ReadOnly):
    """A read-only store over HTTP: `url`/latest and `url`/blobs/HASH, with a Range where a transfer resumes."""

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = client(token=token, ca_file=ca_file, most=MAX_MANIFEST)
        self._head: tuple[str, bytes] | None = None  # ETag, content

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> HttpStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def latest(self) -> bytes | None:
        headers = {"If-None-Match": self._head[0]} if self._head else {}
        with self._translated(), self._client.stream("GET", f"{self.url}/latest", headers=headers) as response:
            if response.status_code == 304 and self._head:
                return self._head[1]
            if response.status_code == 404:
                return None
            response.raise_for_status()
            content = bytearray()
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > MAX_HEAD:
                    raise Refused(f"the head at {self.url} is larger than {MAX_HEAD} bytes")
            tag = response.headers.get("ETag", "")
            self._head = (tag, bytes(content)) if tag and tag.isascii() else None  # a header must be ASCII
            return bytes(content)

    def get(self, digest: bytes, start: int = 0) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-"} if start else {}
        address = f"{self.url}/blobs/{digest.hex()}"
        with self._translated(), self._client.stream("GET", address, headers=headers) as response:
            if response.status_code == 404:
                raise Missing(f"{self.url} has no blob {digest.hex()}")
            if response.status_code == 416:  # the whole blob had arrived
                return
            response.raise_for_status()
            skip = 0 if response.status_code == 206 else start  # the server may ignore the Range
            for chunk in response.iter_bytes():
                yield chunk[skip:]
                skip = max(0, skip - len(chunk))

    def has(self, digest: bytes) -> bool:
        with self._translated():
            return self._client.head(f"{self.url}/blobs/{digest.hex()}").status_code == 200

    def squash(self, sequence: int) -> bool:
        with self._translated():
            return self._client.post(f"{self.url}/squash/{sequence}").status_code == 201

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise StoreError(f"{self.url}: {error or type(error).__name__}") from error


def check_store(url: str) -> None:
    """Raises `ConfigError` for a login in `fleet.store`."""
    if "://" in url:
        instead = (
            "and give it as the storage's own client takes it, by environment or file (AWS_ACCESS_KEY_ID, "
            "~/.aws/credentials), or as fsspec does (FSSPEC_SFTP_PASSWORD, ~/.config/fsspec/*.json)"
        )
        refuse_login("fleet.store", url, instead)


def open_store(url: str, **options: Any) -> Store:
    """The store at a folder's path, an http(s) URL, or a URL that fsspec knows (s3://, gs://, memory://, ...).

    `options`: `token` and `ca_file` for HTTP, the file system's own for fsspec. Raises `ConfigError`.
    """
    if re.fullmatch(r"[\w.-]+:\d+", url):
        raise ConfigError(f"the store {url!r} is an address without a scheme; write http://{url}")
    if url.startswith(("http://", "https://")):
        return HttpStore(url, **options)
    local = re.match("(file|local)://", url)  # fsspec's would let two publishers create the same head
    if "://" in url and not local:
        return FsspecStore(url, **options)
    return FolderStore(url[local.end() :] if local else url)
