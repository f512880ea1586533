"""GiGPO: episodes compared within their group, and turns with others that began in the same state.

States are the same if their tokens are, whichever tensors and rows these lie in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt.checks import check_finite, check_mask, check_shape
from torchrl_mt.objectives.functional.group import GroupKind, group_advantage
from torchrl_mt.objectives.functional.outcome import outcome_advantage
from torchrl_mt.objectives.functional.time.episodes import index_turns


def message_states(
    tokens: Tensor, attention_mask: Tensor, mask: Tensor, turns: Tensor, episode: Tensor
) -> Tensor:
    """Number the states in which turns began, by the tokens that came last before each.

    A turn's state is what its row has from the last sampled token before the turn (or else the row's
    start) up to its first sampled token: the environment's last message, or the prompt. Two states are
    the same if these tokens are; what came before does not count. In a row that begins anew with this
    turn, that is the whole prompt. A turn without such tokens has a state of its own.

    Args:
        tokens: ``[N, S]`` int64.
        attention_mask: ``[N, S]`` bool, false on padding, which is not read.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row.

    Returns:
        ``[N, S]`` int64: the number of its turn's state on each sampled token, -1 elsewhere.

    Examples:
        >>> tokens = torch.tensor([[7, 1, 8, 2], [8, 3, 7, 4]])
        >>> mask = torch.tensor([[False, True, False, True]]).expand(2, 4)
        >>> turns = torch.tensor([[0, 0, 1, 1]]).expand(2, 4)
        >>> message_states(tokens, torch.ones_like(mask), mask, turns, torch.tensor([0, 1]))
        tensor([[-1,  0, -1,  1],
                [-1,  1, -1,  0]])
    """
    check_mask("mask", mask, tokens.shape)
    check_mask("attention_mask", attention_mask, tokens.shape)
    index = index_turns(mask, turns, episode)
    rows, sampled = tokens.cpu(), mask.cpu()
    shown = attention_mask.cpu() & ~sampled
    known: dict[object, int] = {}
    numbers = []
    for first in index.first_token.tolist():
        row, end = divmod(first, mask.shape[1])
        before = sampled[row, :end].nonzero()
        message = slice(int(before[-1]) if len(before) else 0, end)
        state = rows[row, message][shown[row, message]].numpy().tobytes()
        numbers.append(known.setdefault(state or first, len(known)))
    return index.write(torch.tensor(numbers, dtype=torch.long, device=mask.device) + 1) - 1


def gigpo_advantage(
    returns: Tensor,
    outcome: Tensor,
    mask: Tensor,
    turns: Tensor,
    episode: Tensor,
    group: Tensor,
    state: Tensor,
    kind: GroupKind = "dr_grpo",
    *,
    step_weight: float = 1.0,
    lone_value: float = 0.0,
) -> Tensor:
    """Group-in-group advantage: of the episode, plus that of the turn (https://arxiv.org/abs/2505.10978).

    The episode's outcome is compared within its group; the turn's return-to-go within the turns of the
    group that began in the same state, of whichever episodes::

        A = compare(outcome, group) + step_weight * compare(returns, (group, state))

    Each episode counts once in the first, each turn once in the second. A turn alone in its state has
    the first term only.

    Args:
        returns: ``[N, S]`` floating: each turn's return-to-go, read at its first sampled token.
        outcome: ``[N, S]`` floating: the same without a discount, read at an episode's first turn.
        mask: ``[N, S]`` bool, true on sampled tokens.
        turns: ``[N, S]`` int64 turn id of each token; not read on masked tokens.
        episode: ``[N]`` int64 episode id of each row.
        group: ``[N]`` int64 group id of each row; one per episode.
        state: ``[N, S]`` int64 state in which each token's turn began, as of :func:`message_states`, or
            other ids; read at each turn's first sampled token.
        kind: How values are compared: see :func:`group_advantage`. The paper has ``"grpo"`` and
            ``"dr_grpo"``.
        step_weight: Weight of the turn's advantage.
        lone_value: Advantage of an episode alone in its group.

    Returns:
        ``[N, S]`` float32, zero on masked tokens.

    Examples:
        >>> returns, mask = torch.tensor([[3.0, 1.0], [5.0, 5.0]]), torch.ones(2, 2, dtype=torch.bool)
        >>> turns, state = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [0, 0]])
        >>> gigpo_advantage(returns, returns, mask, turns, torch.arange(2), torch.zeros(2).long(), state)
        tensor([[-2.3333, -1.0000],
                [ 1.6667,  1.6667]])
    """
    check_finite("step_weight", step_weight)
    check_shape("state", state, mask.shape)
    check_shape("returns", returns, mask.shape)
    whole = outcome_advantage(outcome, mask, turns, episode, group, kind, lone_value=lone_value)
    index = index_turns(mask, turns, episode)
    where = torch.stack([group.unsqueeze(-1).expand_as(state), state], dim=-1)
    where = where.flatten(0, 1)[index.first_token]
    same = torch.unique(where, dim=0, return_inverse=True)[1]
    step = index.write(group_advantage(index.read(returns), same, kind))
    return whole + step_weight * step
