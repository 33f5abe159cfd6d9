"""What a version of the weights consists of, signed; and the head, which says where the newest one is.

A version is `run_id/step`. Its tensors' encoded bytes form one stream, in the manifest's order, that is cut into pieces
of `PIECE` bytes: each piece is a blob of the store under its own hash. So tensors of any size cost few requests, a
transfer that breaks resumes at a piece, and every piece is checked by itself.

A manifest is a blob, too: magic, Ed25519 signature, zstd of msgpack. `sequence` counts publications and only grows,
whereas `step` goes back where a trainer resumes from an older checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rlloop.errors import ConfigError, SyncError
from rlloop.sync.bits import WIDTH, size_of

FORMAT = 1
MAGIC = b"rlloop-manifest1"
PIECE = 8 << 20
MAX_MANIFEST = 64 << 20  # bytes, before and after decompression: some hundred thousand tensors
MAX_HEAD = 1 << 20
MAX_TENSOR = 1 << 40

# "joined": in the encoding of the entry before
CodecName = Literal["unchanged", "steps", "planes", "full", "joined"]


class Refused(SyncError):
    """Something fetched is not what it must be: forged, damaged, oversize, of another chain, or too old."""


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a version: where its encoding stands in the stream, and what decoding must give."""

    name: str  # Hugging Face's: per expert, unfused
    dtype: str  # safetensors'
    shape: tuple[int, ...]
    codec: CodecName
    start: int
    size: int  # encoded bytes
    digest: bytes  # blake3 of the new state


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to a version: from its parent's state (a delta) or from nothing (an anchor).

    The first manifest of a version is its identity. An anchor or a squashed delta that is made later for the same
    state names it in `state_of`, and a replica that came by it stands where the chain goes on.
    """

    run_id: str
    step: int
    sequence: int
    parent: bytes | None  # hash of the manifest whose state this one changes; None: everything is here
    state_of: bytes | None  # None: this manifest is the version's identity itself
    tensors: tuple[Entry, ...]
    aliases: dict[str, str]  # tied weights: another name -> the name under `tensors`
    pieces: tuple[bytes, ...]  # hashes of the stream's pieces, `PIECE` bytes each, the last one shorter
    root: bytes  # blake3 over every name, type, shape and digest
    format: int = FORMAT

    @property
    def version(self) -> str:
        return f"{self.run_id}/{self.step}"

    @property
    def stream_bytes(self) -> int:
        return sum(entry.size for entry in self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of the tensors themselves."""
        return sum(size_of(entry.dtype, entry.shape) for entry in self.tensors)

    def piece_size(self, index: int) -> int:
        return min(PIECE, self.stream_bytes - index * PIECE)

    def sign(self, key: Ed25519PrivateKey) -> bytes:
        """The manifest as it is stored; its blake3 is the hash that others name it by."""
        body = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(self))
        return MAGIC + key.sign(MAGIC + body) + body

    @classmethod
    def verify(cls, signed: bytes, public_key: Ed25519PublicKey) -> Manifest:
        """The manifest that `signed` holds. Raises `Refused`; nothing is parsed before the signature is found good."""
        signature, body = signed[len(MAGIC) : len(MAGIC) + 64], signed[len(MAGIC) + 64 :]
        if not signed.startswith(MAGIC):
            raise Refused("not a manifest of this format")
        try:
            public_key.verify(signature, MAGIC + body)
        except InvalidSignature:
            raise Refused("a manifest's signature does not hold: it was damaged, or another key signed it") from None
        try:
            if zstandard.frame_content_size(body) > MAX_MANIFEST:
                raise Refused(f"a manifest is larger than {MAX_MANIFEST} bytes")
            plain = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_MANIFEST)
            manifest = msgspec.msgpack.decode(plain, type=cls)
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise Refused(f"a manifest cannot be read: {error}") from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        if self.format != FORMAT:
            raise Refused(f"manifest {self.version} has format {self.format}; this version reads {FORMAT}")
        place, names, joinable = 0, set[str](), None
        for entry in self.tensors:
            if entry.dtype not in WIDTH or any(side < 0 for side in entry.shape):
                raise Refused(f"{entry.name} has type {entry.dtype} and shape {entry.shape}")
            if size_of(entry.dtype, entry.shape) > MAX_TENSOR:
                raise Refused(f"{entry.name} of shape {entry.shape} is larger than {MAX_TENSOR} bytes")
            if entry.codec == "joined" and (entry.size or entry.dtype != joinable):
                raise Refused(f"manifest {self.version} joins {entry.name} to what it cannot be joined to")
            if entry.codec != "joined":
                joinable = None if entry.codec == "unchanged" else entry.dtype
            if entry.start != place or entry.size < 0 or len(entry.digest) != 32 or entry.name in names:
                raise Refused(f"manifest {self.version} is inconsistent at {entry.name}")
            place += entry.size
            names.add(entry.name)
        if any(alias in names or name not in names for alias, name in self.aliases.items()):
            raise Refused(f"manifest {self.version} has aliases that are tensors, or of none")
        if len(self.pieces) != math.ceil(place / PIECE) or any(len(piece) != 32 for piece in self.pieces):
            raise Refused(f"manifest {self.version} has {len(self.pieces)} pieces for {place} bytes")
        if self.root != root_hash(self.tensors):
            raise Refused(f"manifest {self.version} has a root that is not its tensors'")


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest as the head lists it: enough to choose a way without fetching any."""

    manifest: bytes  # hash
    sequence: int  # where it leads
    step: int
    base: int | None  # the sequence that it starts from; None: an anchor
    root: bytes
    wire_bytes: int  # manifest and stream


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version and the ways to it; what the store's compare-and-swap guards.

    Not signed: a false head can lead a replica to nothing but manifests that it refuses, or keep it where it is.
    """

    run_id: str
    chain: tuple[Link, ...]  # identities, ascending, without a gap; the last one is the newest version
    shortcuts: tuple[Link, ...] = ()  # anchors and squashed deltas to members of the chain
    format: int = FORMAT

    @property
    def newest(self) -> Link:
        return self.chain[-1]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> Head:
        """Raises `Refused` where it is none."""
        if len(content) > MAX_HEAD:
            raise Refused(f"the head is larger than {MAX_HEAD} bytes")
        try:
            head = msgspec.msgpack.decode(content, type=cls)
        except msgspec.MsgspecError as error:
            raise Refused(f"the head cannot be read: {error}") from None
        if head.format != FORMAT or not head.chain:
            raise Refused(f"the head has format {head.format} and {len(head.chain)} versions; this one reads {FORMAT}")
        return head


def root_hash(entries: Iterable[Entry]) -> bytes:
    """One hash for the whole state, whatever the order and the encoding."""
    states = sorted((entry.name, entry.dtype, entry.shape, entry.digest) for entry in entries)
    return blake3(msgspec.msgpack.encode(states)).digest()


def hash_of(blob: bytes | bytearray | memoryview) -> bytes:
    return blake3(blob, max_threads=1).digest()


# ---------------------------------------------------------------------------------------------------- keys


def new_key(path: Path) -> Ed25519PrivateKey:
    """A new private key in `path` (mode 0600, PEM), its public key beside it in `path`.pub (hex)."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(pem)
    path.with_name(path.name + ".pub").write_text(public_hex(key) + "\n")
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no private key that can be read ({error}); it must be an Ed25519 PEM"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a {type(key).__name__}; it must be an Ed25519 private key")
    return key


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    return load_key(path) if path.exists() else new_key(path)


def public_key(text: str) -> Ed25519PublicKey:
    """From the 64 hexadecimal digits of a .pub file."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text.strip()))
    except ValueError:
        raise ConfigError(f"{text.strip()[:80]!r} is no public key; it must be 64 hexadecimal digits") from None


def public_hex(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
