"""Conversations as training rows: token for token what the chat template renders, answers marked.

A row has the keys of :class:`~torchrl_mt.transforms.MergeTurns`, so that whatever takes a played episode
takes a written one.
"""

from __future__ import annotations

import json
import logging
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from torchrl_mt.chat.dialogue_spans import DialogueRenderer
from torchrl_mt.checks import check_positive_integer
from torchrl_mt.datasets.conversations.conversation_formats import (
    Completion,
    Conversation,
    read_conversation,
)
from torchrl_mt.datasets.registry import import_extra

if TYPE_CHECKING:
    import datasets

__all__ = ["ConversationDataset"]

_logger = logging.getLogger("torchrl_mt")

_WEIGHTS = ("weights", "full")
_FILL: dict[NestedKey, float] = {
    ("masks", "all_attention_mask"): False,
    ("masks", "all_assistant_mask"): False,
    ("log_probs", "full"): 0.0,
    ("versions", "full"): -1,
    ("turns", "full"): -1,
    ("rewards", "full"): 0.0,
    _WEIGHTS: 1.0,
}
"""Entries with one value per token, and their values on padding."""


class ConversationDataset(Dataset):
    """Conversations as training rows, for a supervised start.

    **Rows.** The tokens are those of ``tokenizer.apply_chat_template`` on the whole conversation. The
    assistant mask is true on what a policy would sample: each answer from the end of its generation
    prompt up to and including the token that ends its turn. If the template has ``{% generation %}``
    blocks, only what they enclose of the answers is trained, and the token that ends the turn. Templates
    that drop earlier thoughts drop them here too, with a warning; to keep them, set
    ``tokenizer.chat_template = ChatTokens(tokenizer, template="training").source``.

    The keys are those of :class:`~torchrl_mt.transforms.MergeTurns`. Log-probabilities and rewards are
    0, versions are -1, and each conversation is its own episode and group, numbered as in the source.

    **Sources.** Rows are mappings with one of

    - ``messages``: mappings with ``role`` and ``content``, and possibly ``tool_calls`` and
      ``reasoning_content``;
    - ``conversations`` (ShareGPT): mappings with ``from`` and ``value``;
    - ``prompt`` and ``completion`` (TRL): messages, of which only those of the completion are trained;
      or text, which is encoded without a template and ends with the end-of-sequence token.

    A row may also have ``tools`` (JSON schemas, or JSON text) and ``system`` (text). An assistant
    message with ``"weight": 0`` or ``"train": False`` is not trained. Weights other than 0 and 1 become
    ``("weights", "full")``.

    As everywhere, the names of special tokens in a message are ordinary text. Answers may hold some,
    such as the marks of tool calls, but none that ends a turn.

    Args:
        source: a Hugging Face ``datasets.Dataset``, an iterable of rows, or the path of a file
            (``.jsonl``, ``.json`` or ``.parquet``) or of a folder that ``datasets`` or Parquet files
            are saved in. Lines of a ``.jsonl`` file are read when they are asked for.
        tokenizer: a fast tokenizer with a chat template and an end-of-turn token.
        max_length: maximum length of a row, in tokens. Longer rows are cut at the end, as TRL does. A
            row without a trained token is given out with a warning that names its index.

    Raises:
        TypeError: if the source is none of these.
        ValueError: if the tokenizer or ``max_length`` does not fit, or a file is of another kind.
        FileNotFoundError: if there is no file or folder at the path.
        ImportError: if the source needs the package ``datasets``, and it is not installed.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> talk = [("user", "guess"), ("assistant", "8"), ("user", "lower"), ("assistant", "4")]
        >>> messages = [{"role": role, "content": content} for role, content in talk]
        >>> tokenizer = tiny_chat_tokenizer("guess lower 4 8")
        >>> dataset = ConversationDataset([{"messages": messages}], tokenizer)
        >>> (rows,) = DataLoader(dataset, batch_size=8, collate_fn=dataset.collate)
        >>> trained = rows["tokens", "full"][rows["masks", "all_assistant_mask"]]
        >>> tokenizer.decode(trained)
        '8 <end> 4 <end>'
    """

    def __init__(
        self,
        source: datasets.Dataset | Iterable[Mapping[str, Any]] | str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
    ) -> None:
        if max_length is not None:
            check_positive_integer("max_length", max_length)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "tokenizer must be a fast one, which tells the place of each token in the text, got "
                f"{type(tokenizer).__name__}: load it with AutoTokenizer.from_pretrained(..., "
                "use_fast=True)."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._rows = _rows_of(source)
        # Arrow's structs have the same keys in all rows, so None may be fill-in.
        features = getattr(self._rows, "features", None)
        self._is_filled = features is not None and "Json(" not in repr(features)
        self._renderer = DialogueRenderer(tokenizer)
        self._warned: set[str] = set()
        self._untrained: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TensorDict:
        """Return one row.

        Args:
            index: number of the conversation; negative ones count from the end.

        Returns:
            A TensorDict without batch dimensions. Entries per token have shape ``[S]``.

        Raises:
            IndexError: if there is no such conversation.
            ValueError, TypeError: if the conversation cannot be rendered; names it and the message.
        """
        number = operator.index(index)
        number += len(self) * (number < 0)
        if not 0 <= number < len(self):
            raise IndexError(f"index must be below {len(self)}, the conversations, got {index}.")
        try:
            read = read_conversation(self._rows[number], drop_none=self._is_filled)
            if isinstance(read, Completion):
                tokens, weights, turns = self._completion(read)
            else:
                tokens, weights, turns = self._conversation(read, number)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"conversation {number}: {error}") from error
        trained = weights > 0
        cut = slice(self.max_length)
        if not trained[cut].any():
            self._warn_untrained(number, bool(trained.any()))
        tokens = tokens[cut]
        of_index, unknown = torch.tensor(number), torch.tensor(-1)
        row: dict[str, Any] = {
            "tokens": {"full": tokens},
            "masks": {
                "all_attention_mask": torch.ones(len(tokens), dtype=torch.bool),
                "all_assistant_mask": trained[cut],
            },
            "turns": {"full": turns[cut]},
            "log_probs": {"full": torch.zeros(len(tokens))},
            "versions": {
                "full": torch.full_like(tokens, -1),
                "oldest": unknown,
                "newest": unknown.clone(),
            },
            "rewards": {"full": torch.zeros(len(tokens))},
            **{name: of_index.clone() for name in ("episode", "group", "episode_index")},
            "fork": torch.tensor(0),
        }
        if ((weights != 0) & (weights != 1)).any():
            row["weights"] = {"full": weights[cut]}
        return TensorDict(row)

    def collate(self, rows: Sequence[TensorDictBase]) -> TensorDict:
        """Stack rows, padded on the right, as ``collate_fn`` of a ``DataLoader``.

        Args:
            rows: rows of this data set, at least one.

        Returns:
            A TensorDict of batch size ``[N]``. Padding has the tokenizer's pad token, or its
            end-of-sequence token if it has none; the masks tell it apart.
        """
        pad = self.tokenizer.pad_token_id
        fill = {("tokens", "full"): self.tokenizer.eos_token_id if pad is None else pad, **_FILL}
        out: dict[NestedKey, Tensor] = {}
        for key in dict.fromkeys(key for row in rows for key in row.keys(True, True)):
            if key == _WEIGHTS:
                ones = [torch.ones(len(row["tokens", "full"])) for row in rows]
                values = [row.get(key, one) for row, one in zip(rows, ones, strict=True)]
            else:
                values = [row[key] for row in rows]
            out[key] = (
                pad_sequence(values, batch_first=True, padding_value=fill[key])
                if key in fill
                else torch.stack(values)
            )
        return TensorDict(out, batch_size=[len(rows)])

    def _conversation(
        self, conversation: Conversation, number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, weights (0 if not trained) and turns ``[S]`` of a conversation."""
        dialogue = self._renderer.render(conversation.messages, conversation.tools)
        ids, places = self._renderer.encoder.with_places(dialogue.text)
        first, last = [place[0] for place in places], [place[1] for place in places]
        weights, turns = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int64)
        for i, (_, end), spans in zip(
            dialogue.said, dialogue.answers, dialogue.trained, strict=True
        ):
            turns[bisect_left(first, end) :] += 1
            for begin, stop in spans:
                # A token that is shared with what is around the answer counts as the answer's.
                here = slice(bisect_right(last, begin), bisect_left(first, stop))
                weights[here] = conversation.weights[i]
        if dialogue.dropped:
            self._warn(
                "dropped",
                f"the tokenizer's chat template drops a part of message {dialogue.dropped[0]} of "
                f"conversation {number}, such as the thoughts of an earlier turn: it is not trained. "
                "ChatTokens(tokenizer, template='training').source is a template that keeps thoughts.",
            )
        if dialogue.broken:
            self._warn(
                "broken",
                f"message {dialogue.broken[0]} of conversation {number} names a special token that "
                "ends a turn or begins an answer: it is ordinary text.",
            )
        return torch.tensor(ids), torch.from_numpy(weights), torch.from_numpy(turns)

    def _completion(self, row: Completion) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, weights and turns ``[S]`` of a prompt and its completion as plain text."""
        encoded = self.tokenizer(
            row.prompt + row.completion,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
        begin = len(row.prompt)
        trained = [
            last > begin and not special
            for (_, last), special in zip(encoded["offset_mapping"], added, strict=True)
        ]
        if not ids or ids[-1] != self.tokenizer.eos_token_id:
            ids, trained = [*ids, self.tokenizer.eos_token_id], [*trained, False]
        trained[-1] = True
        return torch.tensor(ids), torch.tensor(trained).float(), torch.zeros(len(ids)).long()

    def _warn_untrained(self, number: int, was_cut: bool) -> None:
        if number in self._untrained:
            return
        self._untrained.add(number)
        why = (
            f"its answers lie behind max_length={self.max_length}"
            if was_cut
            else "it has no answer with a weight above 0 in the template's rendering"
        )
        _logger.warning(
            "conversation %d has no trained token: %s (%d so far). Drop it from the data set.",
            *(number, why, len(self._untrained)),
        )

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            _logger.warning("%s This is said once.", message)


class _JsonLines(Sequence):
    """The lines of a file, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        starts, start = [], 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    starts.append(start)
                start += len(line)
        self._starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(f"a line of {self.path} must be JSON, but {error}.") from error


def _rows_of(source: Any) -> Any:
    """A sequence of rows."""
    if isinstance(source, (str, Path)):
        return _rows_at(Path(source))
    if isinstance(source, Mapping):
        raise TypeError(
            "source must be one data set, got a mapping with the keys "
            f"{sorted(map(str, source))}: choose a split, such as source['train']."
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return source
    if isinstance(source, Iterable):
        return list(source)
    raise TypeError(
        "source must be a datasets.Dataset, an iterable of rows or a path, got "
        f"{type(source).__name__}."
    )


def _rows_at(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"source must be a file or a folder, but there is none at {path}.")
    if path.suffix in (".jsonl", ".ndjson"):
        return _JsonLines(path)
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(f"{path} must be a JSON list of rows, got {type(rows).__name__}.")
        return rows
    datasets = import_extra("datasets", "arrow")
    if path.is_dir() and (path / "dataset_info.json").exists():
        return datasets.load_from_disk(str(path))
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or any(file.suffix != ".parquet" for file in files):
        raise ValueError(
            "source must be a .jsonl, .json or .parquet file, or a folder of Parquet files or of "
            f"Dataset.save_to_disk, got {path}."
        )
    parquet = import_extra("pyarrow.parquet", "arrow")
    # Reading them through load_dataset would leave copies in its cache.
    tables = [datasets.table.InMemoryTable(parquet.read_table(file)) for file in files]
    return datasets.concatenate_datasets([datasets.Dataset(table) for table in tables])
