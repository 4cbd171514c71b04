"""Text of token ids, for tokenizers whose tokens are spelled in bytes (GPT-2, Qwen, Llama 3 and their like).

Invariant: the same text as `tokenizers` gives, character for character.

`tokenizers` looks every token up as text, maps each of its characters back to a byte, and copies the whole
twice. Each token's bytes are the same every time, so here they are kept: a fifth of the time for a reply.
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
import tokenizers.decoders


def byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether its tokens' bytes, joined, are its text: no decoder but ByteLevel."""
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, looked up when they are first asked for; none for an id that no token has."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # not kept: a client may ask about any number
            return b""
        found = self[token_id] = _bytes_of(token)
        return found

    def text(self, token_ids: Iterable[int]) -> str:
        """As Tokenizer.decode with special tokens kept."""
        return b"".join(map(self.__getitem__, token_ids)).decode("utf-8", "replace")


def _alphabet() -> dict[str, int]:
    """Byte by the character that spells it (Radford et al., 2019): itself where it can be seen, else the next
    character from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(unseen)}


_BYTE = _alphabet()


def _bytes_of(token: str) -> bytes:
    """A token with a character outside the alphabet, as an added one may have, is spelled in plain text."""
    try:
        return bytes([_BYTE[c] for c in token])
    except KeyError:
        return token.encode()
