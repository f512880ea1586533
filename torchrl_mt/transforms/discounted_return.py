"""Discounted returns of whole episodes.

No reward affects another episode, not even an infinite one. A batch with a part of an episode is
refused, because its returns would be wrong.
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

    The batch holds whole episodes, one after the other; in a ``[B, T]`` batch, each row does. Use it in
    one of three places: as ``EpisodeWriter(transform=...)``, as the transform of a buffer with an
    ``EpisodeSampler``, or as ``postproc`` of a collector that yields whole episodes.

    An episode ends where a ``"done"``, ``"terminated"`` or ``"truncated"`` flag is true. Flags are read
    from the node of ``in_key`` and its parents except the root, and the outermost ones count: for
    ``("next", "agents", "reward")`` usually ``("next", "done")``, which TorchRL's environments set when
    they must be reset. If only agents have flags, the episode ends once all of them are true. An agent
    whose flag is true earlier gets none of the later rewards. Nothing is added for what would follow a
    truncated episode: for bootstrapped or lambda returns, use TorchRL's ``GAE`` or
    ``TDLambdaEstimator`` on sampled clips. A flag is one per step, or has the
    reward's shape, or broadcasts to it (``[..., A, 1]`` to ``[..., A, R]``).

    Args:
        gamma: discount per step, in [0, 1].
        outcome_only: keep only the last step of each episode, with its own reward as its return.
        in_key: key of the reward.
        out_key: key of the return. With a ``ClipSampler(stride=K)``, set ``"return"``: a sampled step
            takes entries outside ``"next"`` from the first of its ``K`` stored steps, so its return
            covers the rewards of all ``K`` (discounted per stored step). ``("next", "return")`` would be
            that of the last, without the rewards before it.

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
    """Tells an :class:`~torchrl_mt.data.EpisodeWriter` to pass many whole episodes at once."""

    def __init__(
        self,
        gamma: float,
        *,
        outcome_only: bool = False,
        in_key: NestedKey = ("next", "reward"),
        out_key: NestedKey = ("next", "return"),
    ) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
        super().__init__(in_keys=[unravel_key(in_key)], out_keys=[unravel_key(out_key)])
        self.gamma = float(gamma)
        self.outcome_only = outcome_only

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the returns.

        Args:
            tensordict: whole episodes, ``[N]`` or ``[B, T]``.

        Returns:
            The same TensorDict with ``out_key``; with ``outcome_only``, a new one ``[E]`` of each
            episode's last step.

        Raises:
            KeyError: if the reward or the done flag is missing.
            ValueError: if an episode does not end in the batch, or a flag's shape does not match the
                reward's.
        """
        in_key, out_key = self.in_keys[0], self.out_keys[0]
        reward = tensordict.get(in_key, None)
        if reward is None:
            raise KeyError(f"in_key {in_key!r} is not in the data.")
        shape = tensordict.batch_size
        if not shape:
            raise ValueError("DiscountedReturn takes whole episodes, [N] or [B, T], got one step.")
        ends, ended = self._ends(tensordict, reward)
        self._check_whole(tensordict, ended)
        if self.outcome_only:
            last = tensordict.reshape(-1) if len(shape) > 1 else tensordict
            last = last[ended.reshape(-1).nonzero().squeeze(1)]
            return last.set(out_key, last.get(in_key).clone())
        flat = (shape.numel(), *reward.shape[len(shape) :])
        returns = discounted_returns(reward.reshape(flat), ends.reshape(flat), self.gamma)
        return tensordict.set(out_key, returns.reshape(reward.shape))

    def _ends(self, tensordict: TensorDictBase, reward: Tensor) -> tuple[Tensor, Tensor]:
        """End flags: for each number of the reward (its shape), and for each step (batch shape)."""
        in_key, dims = self.in_keys[0], tensordict.ndim
        parent = in_key[:-1] if isinstance(in_key, tuple) else ()
        # Not the root: its flags are those of the previous step.
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
                # As in EpisodeWriter, any flag directly under "next" ends an episode.
                ended = flags.any(-1) if node in ((), ("next",)) else flags.all(-1)
        if ends is None or ended is None:
            missing = " nor ".join(str((*node, "done")) for node in reversed(nodes))
            raise KeyError(f"{missing} is not in the data: returns need flags where episodes end.")
        return ends | ended.reshape(*ended.shape, *[1] * (reward.ndim - dims)), ended

    def _check_whole(self, tensordict: TensorDictBase, ended: Tensor) -> None:
        """Refuse a batch with an episode that does not end."""
        whole = ended[..., -1:].all()
        for key in _ID_KEYS:
            ids = tensordict.get(key, None)
            if isinstance(ids, Tensor) and ids.numel() == ended.numel():
                ids = ids.reshape(ended.shape)
                whole = whole & (ended[..., :-1] | (ids[..., 1:] == ids[..., :-1])).all()
        if not bool(whole):
            raise ValueError(
                f"DiscountedReturn needs whole episodes, one after the other, and an episode of "
                f"this batch breaks off without its end. {_WHERE}."
            )

    def inv(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Not supported: buffers are written in parts of episodes."""
        raise NotImplementedError(f"DiscountedReturn has no inverse: {_WHERE}.")

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Not supported: single steps, and writes to a buffer, may lack the rewards that follow."""
        raise NotImplementedError(
            f"DiscountedReturn cannot run while a buffer is written or a step is made: the rewards "
            f"that follow may be missing. {_WHERE}."
        )

    def set_container(self, container: Any) -> None:
        """Refuse to be part of an environment."""
        if isinstance(container, EnvBase) or container.parent is not None:
            raise ValueError(
                f"DiscountedReturn cannot run inside an environment, where the rewards that follow "
                f"a step are not known. {_WHERE}."
            )
        super().set_container(container)


def _like(flag: Tensor, reward: Tensor, dims: int, key: tuple[str, ...]) -> Tensor:
    """Expand a flag to bool of the reward's shape; the first ``dims`` dimensions are the batch's."""
    got, wanted = flag.shape[dims:], reward.shape[dims:]
    if got.numel() == 1:
        return flag.bool().reshape(*flag.shape[:dims], *[1] * len(wanted)).expand_as(reward)
    if got.numel() == wanted.numel():
        return flag.bool().reshape(reward.shape)
    if len(got) == len(wanted) and all(g in (1, w) for g, w in zip(got, wanted, strict=True)):
        return flag.bool().expand_as(reward)
    raise ValueError(
        f"{key} must hold one flag per step, or flags of the shape of the reward: got "
        f"{tuple(got)} per step, for rewards of {tuple(wanted)}."
    )


def discounted_returns(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    r"""Sum of discounted rewards from each step to the end of its episode.

    :math:`G_t = r_t + \gamma\, G_{t+1}`, and :math:`G_t = r_t` at the end of an episode (Sutton and
    Barto, *Reinforcement Learning*, eq. 3.9). It takes ``log2(longest episode)`` passes over the data.

    Args:
        reward: ``[N, ...]``, episodes one after the other, each in order of time.
        end: bool ``[N]``, true at the last step of each episode; the last step of the batch counts as
            one. Or bool of the shape of ``reward``, if its parts (agents, say) end separately.
        gamma: discount per step.

    Returns:
        ``[N, ...]``, detached, in the dtype of ``reward`` (the default dtype if that is not floating).

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
    total, end = reward.detach().reshape(steps, -1), end.reshape(steps, -1)
    narrow = torch.promote_types(reward.dtype, torch.float32)
    if reward.device.type == "cpu" and bool(total.abs().max() < torch.finfo(narrow).max / steps):
        returns = _add_up(total.to(narrow), end, float(gamma))
    else:
        # Wide enough that sums of finite rewards do not overflow.
        wide = torch.float32 if reward.device.type == "mps" else torch.float64
        returns = _add_up_any(total.to(wide), end, float(gamma))
    return returns.reshape(reward.shape).to(reward.dtype)


def _add_up(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    """Add up rewards ``[N, D]`` whose sums are finite; ``end`` is ``[N, 1 or D]``.

    After a pass, ``total[t]`` is the sum of ``k`` rewards from ``t`` on, or of all to its episode's end;
    ``goes_on[t]`` is 1 if the episode of ``t`` goes on at ``t + k``, else 0. Each pass doubles ``k``.
    """
    k, discount, longest = 1, gamma, _longest(end)
    total, other = reward.clone(), torch.empty_like(reward)
    goes_on = (~end[:-1]).to(reward.dtype)
    while k < longest and discount > 0:
        torch.addcmul(total[:-k], goes_on, total[k:], value=discount, out=other[:-k])
        other[-k:] = total[-k:]
        total, other = other, total
        goes_on = goes_on[:-k] * goes_on[k:]
        k, discount = 2 * k, discount * discount
    return total


def _add_up_any(reward: Tensor, end: Tensor, gamma: float) -> Tensor:
    """Add up rewards like :func:`_add_up`, of which some may be infinite."""
    k, discount, longest = 1, gamma, _longest(end)
    total, has_ended = reward.clone(), end[:-1]
    while k < longest and discount > 0:
        # A mask, not a product with 0: another episode's rewards may be infinite.
        total[:-k] += (discount * total[k:]).masked_fill_(has_ended, 0.0)
        has_ended = has_ended[:-k] | has_ended[k:]
        k, discount = 2 * k, discount * discount
    return total


def _longest(end: Tensor) -> int:
    """Length of the longest episode; off the CPU an upper bound, to avoid a device sync."""
    if end.device.type != "cpu":
        return len(end)
    last = torch.cat([end[:-1], torch.ones_like(end[-1:])]).T.reshape(-1).nonzero().squeeze(1)
    return int(last.diff(prepend=last.new_tensor([-1])).max())
