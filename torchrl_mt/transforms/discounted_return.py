"""Discounted returns of whole episodes.

No reward reaches another episode, not even an infinite one. A batch that holds a piece of an episode is
refused: its returns would be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor
from torchrl.envs import EnvBase, Transform

__all__ = ["DiscountedReturn", "discounted_returns"]

_WHERE = (
    "Put it in EpisodeWriter(transform=DiscountedReturn(...)), which calls it once with each whole "
    "episode, or make it the transform of a buffer with an EpisodeSampler"
)

_ID_KEYS: tuple[NestedKey, ...] = (("collector", "traj_ids"), "episode")


class DiscountedReturn(Transform):
    r"""Writes the discounted return :math:`G_t = r_t + \gamma G_{t+1}` of each step.

    The batch holds whole episodes, one after the other; in a ``[B, T]`` batch each row does. An
    episode ends where the outermost flag among ``"done"``, ``"terminated"`` and ``"truncated"`` in
    the nodes around ``in_key`` (but the root) is true: for ``("next", "agents", "reward")`` usually
    ``("next", "done")``, which TorchRL's environments set when they must be reset. If only agents
    have flags, it ends once all of theirs are true. An agent whose own flag is true before that gets
    none of the rewards that follow; flags have the shape of the reward, may be one for all, or
    broadcast (``[..., A, 1]`` to ``[..., A, R]``). There are three places
    for it: as ``EpisodeWriter(transform=...)``; as the transform of a buffer with an
    ``EpisodeSampler``; as ``postproc`` of a collector that yields whole episodes.

    Args:
        gamma: discount per step, in [0, 1].
        outcome_only: keep only the last step of each episode, with its own reward as its return.
        in_key: the reward.
        out_key: where the return goes. For a ``ClipSampler(stride=K)`` give ``"return"``: a sampled
            step takes entries outside ``"next"`` from the first of its ``K`` stored steps, whose
            return holds the rewards of all ``K``, with one discount per stored step;
            ``("next", "return")`` would be that of the last, without the rewards before it.

    Raises:
        ValueError: if ``gamma`` is outside [0, 1].

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> reward = torch.tensor([[1.0], [1.0], [4.0]])
        >>> done = torch.tensor([[False], [True], [True]])
        >>> episodes = TensorDict({"next": {"reward": reward, "done": done}}, [3])
        >>> DiscountedReturn(0.5)(episodes)["next", "return"].squeeze(-1)
        tensor([1.5000, 1.0000, 4.0000])
    """

    takes_many_episodes = True
    """An :class:`~torchrl_mt.data.EpisodeWriter` may hand it many whole episodes at once."""

    def __init__(
        self,
        gamma: float,
        *,
        outcome_only: bool = False,
        in_key: NestedKey = ("next", "reward"),
        out_key: NestedKey = ("next", "return"),
    ) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
        super().__init__(in_keys=[unravel_key(in_key)], out_keys=[unravel_key(out_key)])
        self.gamma = float(gamma)
        self.outcome_only = outcome_only

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the returns.

        Args:
            tensordict: whole episodes, ``[N]`` or ``[B, T]``.

        Returns:
            the same TensorDict with ``out_key``; with ``outcome_only`` a new one, of each episode's
            last step, ``[E]``.

        Raises:
            KeyError: if the reward or the done flag is missing.
            ValueError: if an episode does not end in the batch, or a flag's shape does not go with
                the reward's.
        """
        in_key, out_key = self.in_keys[0], self.out_keys[0]
        reward = tensordict.get(in_key, None)
        if reward is None:
            raise KeyError(f"in_key {in_key!r} is not in the data")
        shape = tensordict.batch_size
        if not shape:
            raise ValueError("DiscountedReturn takes whole episodes, [N] or [B, T], got one step")
        ends, ended = self._ended(tensordict, reward)
        self._check_whole(tensordict, ended)
        if self.outcome_only:
            last = tensordict.reshape(-1) if len(shape) > 1 else tensordict
            last = last[ended.reshape(-1).nonzero().squeeze(1)]
            return last.set(out_key, last.get(in_key).clone())
        flat = (shape.numel(), *reward.shape[len(shape) :])
        returns = discounted_returns(reward.reshape(flat), ends.reshape(flat), self.gamma)
        return tensordict.set(out_key, returns.reshape(reward.shape))

    def _ended(self, tensordict: TensorDictBase, reward: Tensor) -> tuple[Tensor, Tensor]:
        """Where each number of the reward gets no more of what follows, and where episodes end.

        Returns:
            bool of the reward's shape, and bool of the batch's shape.
        """
        in_key, dims = self.in_keys[0], tensordict.ndim
        parent = in_key[:-1] if isinstance(in_key, tuple) else ()
        # Never up to the root: the flags there are those of the step before.
        nodes = [parent[:depth] for depth in range(1, len(parent) + 1)] or [()]
        ends: Tensor | None = None
        ended: Tensor | None = None
        for node in nodes:
            for name in ("done", "terminated", "truncated"):
                flag = tensordict.get((*node, name), None)
                if flag is not None:
                    flag = _like(flag, reward, dims, (*node, name))
                    ends = flag if ends is None else ends | flag
            if ends is not None and ended is None:
                flags = ends.reshape(*tensordict.batch_size, reward.shape[dims:].numel())
                # Under "next" as EpisodeWriter, which ends an episode with any of those flags.
                ended = flags.any(-1) if node in ((), ("next",)) else flags.all(-1)
        if ends is None or ended is None:
            missing = " nor ".join(str((*node, "done")) for node in reversed(nodes))
            raise KeyError(f"{missing} is not in the data: returns need to know where episodes end")
        return ends | ended.reshape(*ended.shape, *[1] * (reward.ndim - dims)), ended

    def _check_whole(self, tensordict: TensorDictBase, ended: Tensor) -> None:
        """Refuse a batch in which an episode breaks off."""
        whole = ended[..., -1:].all()
        for key in _ID_KEYS:
            ids = tensordict.get(key, None)
            if isinstance(ids, Tensor) and ids.numel() == ended.numel():
                ids = ids.reshape(ended.shape)
                whole = whole & (ended[..., :-1] | (ids[..., 1:] == ids[..., :-1])).all()
        if not bool(whole):
            raise ValueError(
                f"DiscountedReturn needs whole episodes, one after the other, and an episode of "
                f"this batch breaks off without its end. {_WHERE}"
            )

    def inv(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Not supported: what is written to a buffer comes in pieces."""
        raise NotImplementedError(f"DiscountedReturn has no inverse: {_WHERE}")

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse to run on single steps or, with ``invert=True``, on what a buffer is written."""
        raise NotImplementedError(
            f"DiscountedReturn cannot run while a buffer is written or a step is made: the rewards "
            f"that follow may be missing. {_WHERE}"
        )

    def set_container(self, container: Any) -> None:
        """Refuse to be part of an environment."""
        if isinstance(container, EnvBase) or container.parent is not None:
            raise ValueError(
                f"DiscountedReturn cannot run inside an environment, where the rewards that follow "
                f"a step are not known. {_WHERE}"
            )
        super().set_container(container)


def _like(flag: Tensor, reward: Tensor, dims: int, key: tuple[str, ...]) -> Tensor:
    """A flag as bool of the reward's shape, of which the first ``dims`` are the batch's."""
    got, wanted = flag.shape[dims:], reward.shape[dims:]
    if got.numel() == 1:
        return flag.bool().reshape(*flag.shape[:dims], *[1] * len(wanted)).expand_as(reward)
    if got.numel() == wanted.numel():
        return flag.bool().reshape(reward.shape)
    if len(got) == len(wanted) and all(g in (1, w) for g, w in zip(got, wanted, strict=True)):
        return flag.bool().expand_as(reward)
    raise ValueError(
        f"{key} must hold one flag per step, or flags of the shape of the reward: got "
        f"{tuple(got)} per step, for rewards of {tuple(wanted)}"
    )


def discounted_returns(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    r"""Sum of discounted rewards from each step to the end of its episode.

    :math:`G_t = r_t + \gamma\, G_{t+1}`, and :math:`G_t = r_t` at the end of an episode (Sutton and
    Barto, *Reinforcement Learning*, eq. 3.9). The recursion is solved in ``log2`` of the longest
    episode's length passes, each of which doubles the number of rewards that a step has added up.

    Args:
        reward: ``[N, ...]``, episodes one after the other, each in order of time.
        end: bool ``[N]``: the last steps of the episodes; the last step of the batch counts as one.
            Or bool of the shape of ``reward``, where parts of it (agents, say) end on their own.
        gamma: discount per step.

    Returns:
        ``[N, ...]``, detached, in the dtype of ``reward`` (the default dtype if that is no floating
        one).

    Examples:
        >>> discounted_returns(
        ...     torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([False, False, True, True]), 0.5
        ... )
        tensor([1.7500, 1.5000, 1.0000, 5.0000])
    """
    if not reward.is_floating_point():
        reward = reward.to(torch.get_default_dtype())
    if not reward.numel():
        return reward.detach()
    steps = len(reward)
    # Wide enough for sums of finite rewards that a smaller type holds.
    wide = torch.float32 if reward.device.type == "mps" else torch.float64
    total = reward.detach().reshape(steps, -1).to(wide, copy=True)
    end = end.reshape(steps, -1)
    # After a pass, total[t] is the sum of the k rewards from t on, or of all that its episode has left;
    # has_ended[t] tells whether the episode of t ends before t + k.
    k, discount, has_ended, longest = 1, float(gamma), end[:-1], _longest(end)
    while k < longest and discount > 0:
        # Filled, not multiplied by 0: the rewards of another episode may be infinite.
        total[:-k] += (discount * total[k:]).masked_fill_(has_ended, 0.0)
        has_ended = has_ended[:-k] | has_ended[k:]
        k, discount = 2 * k, discount * discount
    return total.reshape(reward.shape).to(reward.dtype)


def _longest(end: Tensor) -> int:
    """Steps of the longest episode, or more where finding out would mean to wait for the device."""
    if end.device.type != "cpu":
        return len(end)
    last = torch.cat([end[:-1], torch.ones_like(end[-1:])]).T.reshape(-1).nonzero().squeeze(1)
    return int(last.diff(prepend=last.new_tensor([-1])).max())
