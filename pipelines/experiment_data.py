"""Conversations of the experiment as packed token ids: one small file, written once, read by every arm.

The file is a NumPy archive without pickled objects: the tokens of all conversations end to end as 16-bit numbers, the
length of each, how much of it is the prompt, and how many from the front are held out. INFO_FILE beside it says how
they were made.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from domino_core.atomic_files import whole, write_atomically
from domino_core.json_files import read_object

LARGEST_VOCABULARY = 1 << 16  # of 16-bit numbers


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A rendered prompt and the target's answer, its last token included."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """num_heldout: of the first ones; they are measured on and never trained on."""

    rows: tuple[Conversation, ...]
    num_heldout: int

    @cached_property
    def train(self) -> tuple[Conversation, ...]:
        return self.rows[self.num_heldout :]

    @property
    def heldout_prompts(self) -> list[tuple[int, ...]]:
        return [row.prompt_ids for row in self.rows[: self.num_heldout]]

    def share(self, share: float) -> Conversations:
        """The held-out ones, and the first of the others: nested, so that more data is the same data and more."""
        kept = round(share * len(self.train))
        if not 0 < kept <= len(self.train):
            raise ValueError(f"a share of {share:g} of {len(self.train)} conversations is none, or more than all")
        return Conversations(rows=self.rows[: self.num_heldout + kept], num_heldout=self.num_heldout)

    def statistics(self) -> dict[str, Any]:
        """Counts and lengths, as JSON-ready values."""
        parts = {"train": self.train, "heldout": self.rows[: self.num_heldout]}
        return {name: _figures(rows) for name, rows in parts.items() if rows}


def write_conversations(path: Path, found: Conversations, info: dict[str, Any]) -> None:
    """The archive and its description. ValueError if a token does not fit."""
    ids = [token for row in found.rows for token in (*row.prompt_ids, *row.answer_ids)]
    if max(ids) >= LARGEST_VOCABULARY:
        raise ValueError(f"token id {max(ids)} does not fit into 16 bits: packed data is for smaller vocabularies")
    with whole(path) as made, made.open("wb") as file:
        np.savez_compressed(
            file,
            ids=np.array(ids, dtype=np.uint16),
            lengths=np.array([len(row.prompt_ids) + len(row.answer_ids) for row in found.rows], dtype=np.uint16),
            prompts=np.array([len(row.prompt_ids) for row in found.rows], dtype=np.uint16),
            heldout=np.array(found.num_heldout),
        )
        file.flush()
        described = info | {"bytes": made.stat().st_size, "statistics": found.statistics()}
        write_atomically(info_file(path), (json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode())


def read_conversations(path: str | Path) -> Conversations:
    """What write_conversations wrote. ValueError for another file."""
    try:  # the boundary: any file may have been named
        with np.load(path, allow_pickle=False) as archive:
            ids, lengths, prompts, heldout = (archive[name] for name in ("ids", "lengths", "prompts", "heldout"))
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} holds no packed conversations ({type(error).__name__}: {error})") from error
    described = lengths.shape == prompts.shape and (ids.ndim, lengths.ndim, heldout.ndim) == (1, 1, 0)
    described &= all(part.dtype.kind in "iu" for part in (ids, lengths, prompts, heldout))
    if not (
        described
        and int(lengths.sum(dtype=np.int64)) == len(ids)
        and ((prompts > 0) & (prompts < lengths)).all()
        and 0 <= heldout < len(lengths)
    ):
        raise ValueError(f"{path} is damaged: its lengths do not describe its tokens")
    ends = lengths.cumsum(dtype=np.int64)
    rows: list[Conversation] = []
    for start, end, prompt in zip((ends - lengths).tolist(), ends.tolist(), prompts.tolist(), strict=True):
        tokens: list[int] = ids[start:end].tolist()
        rows.append(Conversation(prompt_ids=tuple(tokens[:prompt]), answer_ids=tuple(tokens[prompt:])))
    return Conversations(rows=tuple(rows), num_heldout=int(heldout))


def check_made_for(path: Path, found: Conversations, vocab_size: int, target_hash: str) -> None:
    """ValueError for conversations of another target: tokens that this one lacks, or another name beside them."""
    largest = max(token for row in found.rows for token in (*row.prompt_ids, *row.answer_ids))
    if largest >= vocab_size:
        raise ValueError(f"{path} has token {largest}, of a target with a larger vocabulary than {vocab_size:,}")
    described = info_file(path)
    made_by = read_object(described).get("target_hash", target_hash) if described.exists() else target_hash
    if made_by != target_hash:
        raise ValueError(f"{path} was made by target {made_by}, and --target is {target_hash}; make data with `data`")


def info_file(path: Path) -> Path:
    """Settings, counts and statistics of a data file, beside it."""
    return path.with_name(f"{path.stem}.info.json")


def unused_token(found: Conversations, special_ids: Sequence[int], vocab_size: int, num_known: int) -> int:
    """An id for the mask token: one without a token, or a special token that no text has. ValueError if there is none.

    special_ids: the tokenizer's, num_known: how many ids it has.
    """
    if num_known < vocab_size:
        return num_known
    used = {token for row in found.rows for token in (*row.prompt_ids, *row.answer_ids)}
    free = sorted(set(special_ids) - used)
    if not free:
        raise ValueError("every special token of the tokenizer is in the data: none is left for the mask token")
    return free[-1]


def _figures(rows: Sequence[Conversation]) -> dict[str, Any]:
    prompts, answers = (np.array([len(getattr(row, f"{name}_ids")) for row in rows]) for name in ("prompt", "answer"))
    figures: dict[str, Any] = {"conversations": len(rows), "supervised_tokens": int(answers.sum())}
    for name, lengths in (("prompt_tokens", prompts), ("answer_tokens", answers)):
        figures[name] = {
            f"p{share}": int(np.percentile(lengths, share, method="nearest")) for share in (5, 50, 95, 100)
        }
    return figures
