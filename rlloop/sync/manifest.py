"""What a version of the weights consists of, signed; and the head, which says where the newest one is.

A version is `run_id/step`. Its tensors' encoded bytes form one stream, in the listing's order, that is cut into pieces
of `PIECE` bytes: each piece is a blob of the store under its own hash. So tensors of any size cost few requests, a
transfer that breaks resumes at a piece, and every piece is checked by itself.

A manifest is a blob, too: magic, Ed25519 signature, zstd of msgpack. It says what this version alone has. Names, types
and shapes are a blob of their own, the *listing*, which versions share and a manifest names by its hash. Digests are
not sent: who has decoded the tensors can compute them, and the root is over all of them. `sequence` counts publications
and only grows, whereas `step` goes back where a trainer resumes from an older checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rlloop.errors import UNREADABLE, ConfigError, SyncError
from rlloop.sync.bits import WIDTH, size_of

FORMAT = 2
MAGIC = b"rlloop:2"
PIECE = 8 << 20
MAX_MANIFEST = 64 << 20  # bytes, before and after decompression; of a listing as well: some hundred thousand tensors
MAX_HEAD = 1 << 20
MAX_TENSOR = 1 << 40

# "joined": in the encoding of the last entry before it that has one. Manifests have each codec's place in this list.
CodecName = Literal["unchanged", "steps", "adaptive", "planes", "full", "joined"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)

T = TypeVar("T")


class Refused(SyncError):
    """Something fetched is not what it must be: forged, damaged, oversize, of another chain, or too old."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a version: what it is, and where its encoding stands in the stream."""

    name: str  # Hugging Face's: per expert, unfused
    dtype: str  # safetensors'
    shape: tuple[int, ...]
    codec: CodecName
    start: int
    size: int  # encoded bytes


class Listing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What versions consist of, whatever their bits: a blob that many manifests name."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type, shape
    aliases: dict[str, str]  # tied weights: another name -> the name under `tensors`

    def encode(self) -> bytes:
        return _packed(self)

    @classmethod
    def decode(cls, content: bytes) -> Listing:
        """Raises `Refused` where it is none."""
        listing = _unpacked(content, cls, "a listing of tensors")
        for name, dtype, shape in listing.tensors:
            if dtype not in WIDTH or any(side < 0 for side in shape):
                raise Refused(f"{name} has type {dtype} and shape {shape}")
            if size_of(dtype, shape) > MAX_TENSOR:
                raise Refused(f"{name} of shape {shape} is larger than {MAX_TENSOR} bytes")
        names = {name for name, _, _ in listing.tensors}
        if len(names) < len(listing.tensors):
            raise Refused("a listing has a name twice")
        if any(alias in names or name not in names for alias, name in listing.aliases.items()):
            raise Refused("a listing has aliases that are tensors, or of none")
        return listing


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest on the wire."""

    run_id: str
    step: int
    sequence: int
    parent: bytes | None
    state_of: bytes | None
    listing: bytes
    root: bytes
    codecs: bytes  # a byte a tensor of the listing
    sizes: tuple[int, ...]  # of the tensors that have an encoding
    pieces: bytes  # 32 bytes each


class Manifest(msgspec.Struct, frozen=True):
    """One way to a version: from its parent's state (a delta) or from nothing (an anchor).

    The first manifest of a version is its identity. An anchor or a squashed delta that is made later for the same
    state names it in `state_of`, and a replica that came by it stands where the chain goes on.
    """

    run_id: str
    step: int
    sequence: int
    parent: bytes | None  # hash of the manifest whose state this one changes; None: everything is here
    state_of: bytes | None  # None: this manifest is the version's identity itself
    listing: bytes  # hash of the `Listing` that `tensors` and `aliases` are of
    tensors: tuple[Entry, ...]
    aliases: dict[str, str]  # tied weights: another name -> the name under `tensors`
    pieces: tuple[bytes, ...]  # hashes of the stream's pieces, `PIECE` bytes each, the last one shorter
    root: bytes  # blake3 over every name, type, shape and digest

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
        codecs = bytes(CODECS.index(entry.codec) for entry in self.tensors)
        sizes = tuple(entry.size for entry in self.tensors if entry.codec not in ("unchanged", "joined"))
        body = _packed(
            _Body(
                self.run_id, self.step, self.sequence, self.parent, self.state_of, self.listing, self.root,
                codecs, sizes, b"".join(self.pieces),
            )
        )  # fmt: skip
        return MAGIC + key.sign(MAGIC + body) + body

    @classmethod
    def verify(cls, signed: bytes, public_key: Ed25519PublicKey, listing_of: Callable[[bytes], Listing]) -> Manifest:
        """The manifest that `signed` holds; `listing_of` a hash brings the listing.

        Raises `Refused`; nothing is parsed before the signature is found good.
        """
        signature, body = signed[len(MAGIC) : len(MAGIC) + 64], signed[len(MAGIC) + 64 :]
        if not signed.startswith(MAGIC):
            raise Refused(f"not a manifest of format {FORMAT}: it begins with {signed[:16]!r}, not with {MAGIC!r}")
        try:
            public_key.verify(signature, MAGIC + body)
        except InvalidSignature:
            raise Refused("a manifest's signature does not hold: it was damaged, or another key signed it") from None
        found = _unpacked(body, _Body, "a manifest")
        hashes = [found.listing, found.root, *(each for each in (found.parent, found.state_of) if each is not None)]
        if any(len(each) != 32 for each in hashes) or len(found.pieces) % 32:
            raise Refused(f"manifest {found.run_id}/{found.step} has hashes of other lengths")
        listing = listing_of(found.listing)
        return cls(
            run_id=found.run_id,
            step=found.step,
            sequence=found.sequence,
            parent=found.parent,
            state_of=found.state_of,
            listing=found.listing,
            tensors=_entries(found, listing),
            aliases=listing.aliases,
            pieces=tuple(found.pieces[at : at + 32] for at in range(0, len(found.pieces), 32)),
            root=found.root,
        )


def _entries(body: _Body, listing: Listing) -> tuple[Entry, ...]:
    """The listing's tensors with what this version makes of each. Raises `Refused`."""
    odd = Refused(f"manifest {body.run_id}/{body.step} does not fit its listing of {len(listing.tensors)} tensors")
    if len(body.codecs) != len(listing.tensors) or any(code >= len(CODECS) for code in body.codecs):
        raise odd
    entries, sizes, place, joinable = list[Entry](), iter(body.sizes), 0, None
    for (name, dtype, shape), code in zip(listing.tensors, body.codecs, strict=True):
        codec, size = CODECS[code], 0
        if codec == "joined" and dtype != joinable:
            raise Refused(f"manifest {body.run_id}/{body.step} joins {name} to what it cannot be joined to")
        if codec not in ("unchanged", "joined"):
            size, joinable = next(sizes, -1), dtype
            if size < 0:
                raise odd
        entries.append(Entry(name, dtype, shape, codec, place, size))
        place += size
    if next(sizes, None) is not None or len(body.pieces) != 32 * math.ceil(place / PIECE):
        raise odd
    return tuple(entries)


def _packed(content: msgspec.Struct) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(content))


def _unpacked(content: bytes, kind: type[T], what: str) -> T:
    """Raises `Refused`; what is larger than `MAX_MANIFEST` is not unpacked."""
    try:
        if zstandard.frame_content_size(content) > MAX_MANIFEST:
            raise Refused(f"{what} is larger than {MAX_MANIFEST} bytes")
        plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=MAX_MANIFEST)
        return msgspec.msgpack.decode(plain, type=kind)
    except (zstandard.ZstdError, *UNREADABLE) as error:
        raise Refused(f"{what} cannot be read: {error}") from None


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest as the head lists it: enough to choose a way without fetching any."""

    manifest: bytes  # hash
    sequence: int  # where it leads
    step: int
    base: int | None  # the sequence that it starts from; None: an anchor
    root: bytes
    wire_bytes: int  # manifest, stream, and the listing where this is the first version that names it


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version and the ways to it; what the store's compare-and-swap guards.

    Not signed: a false head can lead a replica to nothing but manifests that it refuses, or keep it where it is.
    """

    run_id: str
    chain: tuple[Link, ...]  # identities, ascending, without a gap; the last one is the newest version
    shortcuts: tuple[Link, ...] = ()  # anchors and squashed deltas to members of the chain
    format: int = FORMAT
    term: int = 0  # how many publishers have claimed the store so far,
    publisher: str = ""  # and the last of them, by a name of its process's own

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
        except UNREADABLE as error:
            raise Refused(f"the head cannot be read: {error}") from None
        if head.format != FORMAT or not head.chain:
            raise Refused(
                f"the head has format {head.format} and {len(head.chain)} versions; this rlloop reads format {FORMAT}: "
                "publish into a new store, or move the old one's folder away"
            )
        return head


def root_hash(tensors: Iterable[tuple[str, str, tuple[int, ...]]], digests: Mapping[str, bytes]) -> bytes:
    """One hash for the whole state, whatever its order and encoding: names, types and shapes; their bits by name."""
    states = sorted((*tensor, digests[tensor[0]]) for tensor in tensors)
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
        what = "a private key; its .pub file holds the public one" if "PRIVATE" in text else "no public key"
        raise ConfigError(f"what was given ({len(text.strip())} characters) is {what}: 64 hexadecimal digits") from None


def public_hex(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
