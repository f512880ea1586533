"""Conversations as training rows: token for token what the chat template renders, answers marked.

A row has the keys of :class:`~torchrl_mt.transforms.MergeTurns`, so that whatever takes a played episode
takes a written one.
"""

from __future__ import annotations

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
from torchrl_mt.datasets.conversations.conversation_sources import filled_columns, rows_of

if TYPE_CHECKING:
    import datasets

__all__ = ["ConversationDataset"]

_logger = logging.getLogger("torchrl_mt")

_WEIGHTS = ("weights", "full")
_WARNINGS = ("untrained", "dropped", "broken", "lost", "endless")
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

    The tokens are those of ``tokenizer.apply_chat_template`` on the whole conversation. The assistant
    mask is true on what a policy would sample: each answer from the end of its generation prompt up to
    and including the token that ends its turn. The keys are those of
    :class:`~torchrl_mt.transforms.MergeTurns`. :doc:`/conversations` has what templates change, weights,
    and other columns.

    Rows of the source are mappings with one of

    - ``messages``: mappings with ``role`` and ``content``, and possibly ``tool_calls`` and
      ``reasoning_content``;
    - ``conversations`` (ShareGPT): mappings with ``from`` and ``value``;
    - ``prompt`` and ``completion`` (TRL): messages or text, of which only the completion is trained.

    Args:
        source: a Hugging Face ``datasets.Dataset``, an iterable of rows, or the path of a file
            (``.jsonl``, ``.json`` or ``.parquet``) or of a folder that ``datasets``, Parquet files or
            :func:`~torchrl_mt.datasets.open_episodes` are saved in. Lines of a ``.jsonl`` file and
            episodes are read when they are asked for.
        tokenizer: a fast tokenizer with a chat template and an end-of-turn token; text needs no
            template.
        max_length: maximum length of a row, in tokens. Longer rows are cut at the end, as TRL does.

    Raises:
        TypeError: if the source is none of these.
        ValueError: if the tokenizer, ``max_length`` or a file does not fit, or a folder has several
            splits.
        FileNotFoundError: if there is no file or folder at the path.
        ImportError: if the source needs the package ``datasets``, and it is not installed.

    Examples:
        >>> from torchrl_mt.testing import tiny_chat_tokenizer
        >>> tokenizer = tiny_chat_tokenizer("guess 4")
        >>> talk = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "4"}]
        >>> rows = ConversationDataset([{"messages": talk}], tokenizer)[0]
        >>> tokenizer.decode(rows["tokens", "full"][rows["masks", "all_assistant_mask"]])
        '4 <end>'
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
        self._rows = rows_of(source)
        self._filled = filled_columns(source) or filled_columns(self._rows)
        # Processes of a DataLoader get it as it is, instead of examining the template each.
        has_template = tokenizer.chat_template is not None
        self._renderer = DialogueRenderer(tokenizer) if has_template else None
        # Shared memory, so that not each process of each epoch warns again.
        self._warned = torch.zeros(len(_WARNINGS), dtype=torch.bool, device="cpu").share_memory_()

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
            read = read_conversation(self._rows[number], filled=self._filled)
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
            why = (
                f"its answers lie behind max_length={self.max_length}"
                if trained.any()
                else "it has no answer with a weight above 0 in the template's rendering"
            )
            self._warn(
                "untrained",
                f"conversation {number} has no trained token: {why}. Drop such rows: those whose "
                "('masks', 'all_assistant_mask') is all false.",
            )
        tokens = tokens[cut]
        of_index, unknown = torch.tensor(number, device="cpu"), torch.tensor(-1, device="cpu")
        row: dict[str, Any] = {
            "tokens": {"full": tokens},
            "masks": {
                "all_attention_mask": torch.ones(len(tokens), dtype=torch.bool, device="cpu"),
                "all_assistant_mask": trained[cut],
            },
            "turns": {"full": turns[cut]},
            "log_probs": {"full": torch.zeros(len(tokens), device="cpu")},
            "versions": {
                "full": torch.full_like(tokens, -1),
                "oldest": unknown,
                "newest": unknown.clone(),
            },
            "rewards": {"full": torch.zeros(len(tokens), device="cpu")},
            **{name: of_index.clone() for name in ("episode", "group", "episode_index")},
            "fork": torch.tensor(0, device="cpu"),
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
                ones = [torch.ones(len(row["tokens", "full"]), device="cpu") for row in rows]
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
        renderer = self._renderer or DialogueRenderer(
            self.tokenizer
        )  # Refuses one without template.
        dialogue = renderer.render(conversation.messages, conversation.tools)
        ids, places = renderer.encoder.with_places(dialogue.text)
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
                f"conversation {number}, such as the thoughts of an earlier turn, or writes it after a "
                "tool's result: it is not trained. "
                "ChatTokens(tokenizer, template='training').source is a template that keeps thoughts.",
            )
        if dialogue.broken:
            self._warn(
                "broken",
                f"message {dialogue.broken[0]} of conversation {number} names a special token that "
                "ends a turn or begins an answer: it is ordinary text.",
            )
        if dialogue.lost:
            self._warn(
                "lost",
                f"the tokenizer's chat template writes nothing of message {dialogue.lost[0]} of "
                f"conversation {number}, a system message. Put it into the user's first message.",
            )
        endless = [i for i in dialogue.endless if conversation.weights[i] > 0]
        if endless:
            self._warn(
                "endless",
                f"the tokenizer's chat template writes no token that ends a turn after message "
                f"{endless[0]} of conversation {number}, so this answer does not teach when to stop. "
                "Use a template that writes tokenizer.eos_token after answers.",
            )
        return torch.tensor(ids, device="cpu"), torch.from_numpy(weights), torch.from_numpy(turns)

    def _completion(self, row: Completion) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, weights and turns ``[S]`` of a prompt and its completion as plain text."""
        encoded = self.tokenizer(
            row.prompt + row.completion,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer must have an eos_token, which ends a completion, got none: set it."
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
        weights = torch.tensor(trained, device="cpu") * row.weight
        return torch.tensor(ids, device="cpu"), weights, torch.zeros(len(ids), device="cpu").long()

    def _warn(self, kind: str, message: str) -> None:
        """Log a warning once for each kind."""
        place = _WARNINGS.index(kind)
        if not self._warned[place]:
            self._warned[place] = True
            _logger.warning("%s This is said once.", message)
