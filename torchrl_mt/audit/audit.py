"""Audit rows: what they train is what was sampled, once, with the values of the sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from torchrl_mt.audit import checks
from torchrl_mt.audit.against import checks_against, not_against
from torchrl_mt.audit.report import AuditReport, Finding
from torchrl_mt.audit.rows import read_rows
from torchrl_mt.chat.encoding import decode

__all__ = ["audit_rows"]


def audit_rows(
    rows: Any,
    sampled: Any = None,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    tolerance: float = 1e-3,
) -> AuditReport:
    """Check that rows train what was sampled, and nothing else.

    :doc:`/auditing` has the checks. A check that lacks what it needs is "not checked", not "passed".

    Args:
        rows: what is trained, one of

            - rows or experience ``[N]`` (:doc:`/data_format`);
            - the inputs of the loss of TRL's ``GRPOTrainer``: ``prompt_ids`` and ``prompt_mask``
              ``[N, P]``, ``completion_ids``, ``completion_mask`` and, if there are any, ``tool_mask``
              and ``sampling_per_token_logps`` or else ``old_per_token_logps`` ``[N, C]``;
            - a batch of verl: ``input_ids`` and ``attention_mask`` ``[N, S]``, ``responses``,
              ``response_mask`` and, if there are any, ``rollout_log_probs`` or else ``old_log_probs``
              ``[N, R]``;
            - whole episodes of turns: a batch ``[ΣT]``, a replay buffer, a storage, or an
              :class:`~torchrl_mt.datasets.EpisodeDataset`;
            - the path of a ``dump_dir`` or of a file of it, of a data set, of a TensorDict saved with
              ``memmap`` or ``save``, or of a ``.pt`` file with a dict of tensors.

        sampled: what the sampler recorded, one of the same. Evaluations and rejected episodes in a
            ``dump_dir`` are not read.
        model: the policy; it recomputes log-probabilities, at the temperature that rows have, or else 1.
        tokenizer: decodes the tokens of the report.
        tolerance: largest difference of two log-probabilities that counts as none, in nats.

    Returns:
        The findings.

    Raises:
        FileNotFoundError: if there is nothing at a path.
        TypeError: if ``rows`` or ``sampled`` is none of these, or ``model`` no ``nn.Module``.
        ValueError: if they cannot be read, lack an entry, or have no rows; if ``tolerance`` is negative.

    Examples:
        >>> import torch
        >>> sampled = {
        ...     "prompt_ids": torch.tensor([[5, 6]]),
        ...     "prompt_mask": torch.tensor([[1, 1]]),
        ...     "completion_ids": torch.tensor([[7, 2, 9, 7, 2]]),
        ...     "completion_mask": torch.tensor([[1, 1, 1, 1, 1]]),
        ...     "tool_mask": torch.tensor([[1, 1, 0, 1, 1]]),
        ... }
        >>> rows = {key: value for key, value in sampled.items() if key != "tool_mask"}
        >>> report = audit_rows(rows, sampled)
        >>> report.ok
        False
        >>> print(*(finding for finding in report if finding.ok is False))
        failed       never sampled              1  trained tokens that the policy did not sample
                                                   first: row 0, token 4: 9
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module or None, got {type(model).__name__}.")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be 0 or more, got {tolerance}.")
    mine = read_rows(rows, "rows")
    if sampled is None:
        against = [checks.trained_once(mine), *not_against()]
    else:
        theirs = read_rows(sampled, "sampled")
        against = [*checks_against(mine, theirs, tokenizer, tolerance)]
    findings = (
        checks.masks(mine),
        checks.rows_that_train(mine),
        *against,
        checks.versions(mine),
        checks.log_probs(mine),
        checks.recomputed(mine, model, tolerance),
        checks.duplicates(mine),
        checks.equal_rows(mine),
        checks.encoded_again(mine, tokenizer),
    )
    return AuditReport(tuple(_with_text(found, tokenizer) for found in findings))


def _with_text(found: Finding, tokenizer: Any) -> Finding:
    if tokenizer is None or found.first is None:
        return found
    return replace(
        found, first=replace(found.first, text=decode(tokenizer, [found.first.token_id]))
    )
