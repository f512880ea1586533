"""Settings of makers, losses and scores, one by one, as the records that take them."""

from torchrl_mt.objectives import Advantage, Passes, RewardMix, ValueLoss
from torchrl_mt.objectives.functional import OBJECTIVES

PASSES = set(Passes.__dataclass_fields__)
ADVANTAGE = set(Advantage.__dataclass_fields__) - {"kind"}
OF_WHOLE_CALLS = ("clip_cov", "kl_cov")
"""Objectives whose rows depend on each other."""
OF_SINGLE_ROWS = [name for name in OBJECTIVES if name not in OF_WHOLE_CALLS]


def grouped(**flat):
    """Put settings into ``passes``, ``advantage``, ``reward`` and ``critic``; others stay."""
    out = dict(flat)
    passes = {name: out.pop(name) for name in PASSES & out.keys()}
    advantage = {name: out.pop(name) for name in ADVANTAGE & out.keys()}
    if passes:
        out["passes"] = Passes(**passes)
    if advantage:
        out["advantage"] = Advantage(out.get("advantage", "turn"), **advantage)
    if "reward_transform" in out:
        transform = out.pop("reward_transform")
        out["reward"] = RewardMix(out.get("reward", "episode"), transform=transform)
    if "clip_value" in out:
        out["critic"] = ValueLoss(out["critic"], clip_value=out.pop("clip_value"))
    return out
