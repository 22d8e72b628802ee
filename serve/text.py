"""From tokens to text while they come: bytes first, so that no half character and no part of a stop string gets out.

A round of speculative decoding commits several tokens at once. `TextStream` takes them one by one, so that a stop
string ends an answer at the same token, with the same text, whatever the rounds were: cut inside an accepted block or
across two.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte (GPT-2's: printable Latin-1 stands for itself)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The bytes of every token id, and the ids that are never shown (special tokens)."""

    pieces: tuple[bytes, ...]
    special: frozenset[int]

    def shown(self, token: int) -> bytes:
        """What a token adds to the answer. Ids above the vocabulary (padding rows of an embedding) add nothing."""
        return b"" if token in self.special or token >= len(self.pieces) else self.pieces[token]

    def spelled(self, token: int) -> bytes:
        """What a token is called in log-probabilities: special tokens by their name."""
        return self.pieces[token] if token < len(self.pieces) else b""


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """Vocabulary of a fast byte-level BPE tokenizer (Qwen, Llama 3). ValueError for any other kind.

    Joining the bytes and decoding them as UTF-8, malformed parts replaced, is what such a tokenizer's decode() does.
    """
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"decoders": []}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
    if kinds != {"ByteLevel"}:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} decodes with {sorted(kinds) or 'nothing'}; "
            "serving needs a byte-level BPE tokenizer (Qwen, Llama 3), so that text can be cut at any token"
        )
    alphabet = byte_alphabet()
    pieces: list[bytes] = []
    names: list[str | None] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for name in names:
        piece = name or ""  # an id that no token has
        spelled = all(character in alphabet for character in piece)  # added tokens stand there as plain text
        pieces.append(bytes(alphabet[character] for character in piece) if spelled else piece.encode())
    special = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return Vocabulary(pieces=tuple(pieces), special=special)


class TextStream:
    """Text of one answer: `push` gives what may be shown so far, `finish` what was held back.

    Held back: bytes of an unfinished character, and the longest end of the text that may be the start of a stop string.
    Once `stopped`, the text ended before the stop string and nothing more may be pushed.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        assert not self.stopped
        return self._show(self._decoder.decode(self._vocabulary.shown(token)))

    def finish(self) -> str:
        """The rest, once no token follows. An unfinished character becomes U+FFFD, as in decode()."""
        if self.stopped:
            return ""
        shown = self._show(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return shown + held

    def _show(self, text: str) -> str:
        self._held += text
        found = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            shown, self._held, self.stopped = self._held[: min(found)], "", True
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper start of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
