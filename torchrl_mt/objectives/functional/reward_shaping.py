"""Reward shaping: clipping, normalisation by running statistics, a penalty on length.

The running statistics equal those of all rewards at once, whatever their order, batches or shards.
Normalised rewards are finite, even after a single reward or equal ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_mt._hosts.torch import ExactBuffers
from torchrl_mt.checks import check_mask, check_positive
from torchrl_mt.objectives.functional.whitening import Moments, masked_moments


def clip_reward(
    reward: Tensor, low: float, high: float, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Clip rewards, and compute the share that was clipped.

    Args:
        reward: Floating, any shape.
        low: Lowest reward.
        high: Highest reward.
        mask: Bool, the same shape: the rewards to count, by default all.

    Returns:
        The rewards, float32, and the share of rewards under ``mask`` that were clipped, a float32
        scalar (0 if the mask is empty).

    Examples:
        >>> clip_reward(torch.tensor([-7.0, 0.5]), -1.0, 1.0)
        (tensor([-1.0000,  0.5000]), tensor(0.5000))
    """
    if not low <= high:
        raise ValueError(f"low must be at most high ({high}), got {low}.")
    if mask is None:
        mask = torch.ones_like(reward, dtype=torch.bool)
    check_mask("mask", mask, reward.shape)
    clipped = reward.float().clamp(low, high)
    cut = ((clipped != reward.float()) & mask).sum() / mask.sum().clamp(min=1)
    return clipped, cut.detach()


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Compute DAPO's soft overlong punishment, to add to the reward of a response.

    Eq. 13 of https://arxiv.org/abs/2503.14476::

        0                                          length <= max_length - buffer
        (max_length - buffer - length) / buffer    in between
        -1                                         length >= max_length

    Args:
        lengths: Sampled tokens of each response or episode, any shape (``mask.sum(-1)`` of rows).
        max_length: Length in tokens from which the penalty is -1.
        buffer: Tokens before ``max_length`` over which the penalty grows.

    Returns:
        In [-1, 0], float32, the shape of ``lengths``.

    Examples:
        >>> overlong_penalty(torch.tensor([60, 80, 90, 100, 140]), max_length=100, buffer=20)
        tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    check_positive("buffer", buffer)
    if buffer > max_length:
        raise ValueError(f"buffer must be at most max_length ({max_length}), got {buffer}.")
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()


class RewardNormalizer(ExactBuffers):
    """Normalisation of rewards by the running standard deviation, and the mean if asked.

    ``r / (std + eps)``, or ``(r - mean) / (std + eps)`` if centered; the unbiased std of all rewards
    seen, by the merge of Chan, Golub and LeVeque (1979). The state is in buffers, which ``state_dict``
    saves. Ranks may count their own rewards and merge the others' ``moments``. As ``reward_transform``
    of :class:`~torchrl_mt.objectives.ExperienceMaker` it counts each batch once.

    Args:
        center: Subtract the mean. If not, rewards keep their signs. Only for episodes of one reward: a
            mean taken off each of several makes longer episodes cost or pay by themselves. While all
            rewards seen are equal, the results are 0, or the rewards if not centered.
        clip: Largest absolute result, above 0; ``None`` for no bound.
        eps: Added to the standard deviation.

    Examples:
        >>> normalizer = RewardNormalizer()
        >>> normalizer.update(torch.tensor([1.0, 2.0, 3.0]))
        >>> normalizer(torch.tensor([2.0, 3.0]))
        tensor([2., 3.])
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self, *, center: bool = False, clip: float | None = None, eps: float = 1e-8
    ) -> None:
        super().__init__()
        if clip is not None:
            check_positive("clip", clip)
        self.center, self.clip, self.eps = center, clip, eps
        empty = torch.empty(0, device="cpu")
        for name, value in vars(masked_moments(empty, empty.bool())).items():
            self.register_buffer(name, value.clone())

    @property
    def moments(self) -> Moments:
        """Moments of all rewards seen."""
        return Moments(self.count, self.mean, self.m2, self.low, self.high)

    @torch.no_grad()
    def update(self, reward: Tensor | Moments, mask: Tensor | None = None) -> None:
        """Add rewards to the statistics.

        Args:
            reward: Floating, any shape; or another normaliser's ``moments``.
            mask: Bool, the same shape: the rewards that count, by default all.

        Raises:
            ValueError: If a reward that counts is not finite; the statistics are then unchanged.
        """
        if isinstance(reward, Tensor):
            if mask is None:
                mask = torch.ones_like(reward, dtype=torch.bool)
            reward = masked_moments(reward.to(self.mean.device), mask.to(self.mean.device))
        merged = self.moments.merge(reward)
        if not torch.isfinite(merged.m2 + merged.mean):
            raise ValueError(
                "reward must be finite where it counts, got infinity or NaN; "
                "leave such rewards out by `mask`."
            )
        for name, value in vars(merged).items():
            getattr(self, name).copy_(value)

    def forward(self, reward: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise rewards.

        Args:
            reward: Floating, any shape.
            mask: Bool, the same shape: rewards to :meth:`update` the statistics with first; by default
                none.

        Returns:
            float32, the shape of ``reward``.
        """
        if mask is not None:
            self.update(reward, mask)
        device, moments = reward.device, self.moments
        mean = moments.mean.to(device) if self.center else 0.0
        scale = torch.where(moments.spread, 1.0 / (moments.std + self.eps), float(not self.center))
        out = ((reward.to(scale.dtype) - mean) * scale.to(device)).float()
        return out if self.clip is None else out.clamp(-self.clip, self.clip)
