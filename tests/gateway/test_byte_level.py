"""Text of ids is what the tokenizers library says, for every id there is and some that there are not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from areal_gateway.byte_level import TokenBytes, byte_level

LETTERS = [chr(i) for i in range(33, 330)]
ADDED = ("<|im_end|>", "<two words>", "naïve 漢字", "Ġ")


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    """One token for each of the 256 bytes and some more letters, added tokens spelled in and out of the alphabet."""
    found = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ADDED])
    return found


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_text_is_the_library_s(backend: Tokenizer, data: st.DataObject) -> None:
    assert byte_level(backend)
    known = TokenBytes(backend)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=12))
    assert known.text(ids) == backend.decode(ids, skip_special_tokens=False)
    assert known.text(ids) == backend.decode(ids, skip_special_tokens=False)  # and from what is kept


@settings(max_examples=500, deadline=None)
@given(raw=st.binary(max_size=8) | st.text(max_size=4).map(str.encode))
def test_broken_characters_are_marked_alike(backend: Tokenizer, raw: bytes) -> None:
    """Half a character at the end of a reply, or in the middle of one, is as many marks as the library makes it."""
    by_byte = {
        b: next(i for i in range(len(LETTERS)) if TokenBytes(backend)[i] == bytes([b])) for b in set(raw)
    }
    ids = [by_byte[b] for b in raw]
    assert TokenBytes(backend).text(ids) == backend.decode(ids, skip_special_tokens=False)


def test_other_decoders_are_told_apart() -> None:
    plain = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert not byte_level(plain)
    plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert not byte_level(plain)


def test_an_id_below_zero_is_refused(backend: Tokenizer) -> None:
    with pytest.raises(OverflowError):
        TokenBytes(backend).text([-1])


def test_ids_that_no_token_has_take_no_room(backend: Tokenizer) -> None:
    known = TokenBytes(backend)
    assert known.text([0, *range(10_000, 12_000)]) == "!"
    assert len(known) == 1
