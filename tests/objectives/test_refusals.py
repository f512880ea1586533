"""Wrong arguments and rows are refused by name, with what to do, and change nothing."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack
from torchrl.data import AdaptiveKLController

from tests.objectives import helpers
from tests.objectives.conftest import make_model, make_rows
from tests.objectives.helpers import MASK, TokenCritic, completed_rows
from tests.refusals import check_refused, refused
from tests.scoring.helpers import tiny
from tests.settings import grouped
from torchrl_mt import objectives
from torchrl_mt.objectives import Distillation, EntropyController, ExperienceMaker, ValueLoss
from torchrl_mt.objectives.filters import top_entropy
from torchrl_mt.objectives.functional import CORRECTIONS, OBJECTIVES, ppo
from torchrl_mt.objectives.functional.policy.objectives import clip_bounds

MODEL = make_model()
STRANGER = tiny("Llama", vocab_size=MODEL.config.vocab_size + 2000)
SMALLER = make_model(vocab_size=6)
NAN, INF = torch.nan, torch.inf
loss = partial(objectives.MultiTurnLoss, MODEL)
decoupled = OBJECTIVES["decoupled_ppo"]


def maker(**flat: Any) -> ExperienceMaker:
    return ExperienceMaker(MODEL, **grouped(**flat))


def weighing(weight: float) -> ExperienceMaker:
    return maker(reward=[("episode", weight)])


# ---- arguments ------------------------------------------------------------------------------------

STOPPED = AdaptiveKLController(init_kl_coef=0.0, target=1.0, horizon=1)
LARGE = "weight of 'episode' must be a finite number, at most 3.4e38, got …1e+"
TEACHER = "teacher must have the actor's tokenizer, got a Llama"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("actor must be a causal language model", ExperienceMaker, None, error=TypeError),
        refused("advantage must be one of", maker, advantage="best"),
        refused("Did you mean 'turn'", maker, advantage="trun"),
        refused("advantage='gae' needs a critic", maker, advantage="gae"),
        refused("bootstrap=True needs a kind with a critic", maker, bootstrap=True),
        refused("critic must be a torch.nn.Module, got str", maker, critic="x", error=TypeError),
        refused("gamma must lie in", maker, gamma=1.5),
        refused("kl_coef must be finite", maker, kl_coef=NAN, ref=MODEL),
        refused("kl_coef must be finite and not 0", maker, kl_coef=STOPPED, ref=MODEL),
        refused("kl_coef needs a reference", maker, kl_coef=0.1),
        refused("kl_kind must be one of", maker, kl_kind="k9"),
        refused("lmbda must lie in", maker, lmbda=-0.5),
        refused("lone_value must be finite", maker, lone_value=NAN),
        refused("needs a teacher", maker, advantage="distill"),
        refused("old_log_probs must be one of", maker, old_log_probs="critic"),
        refused("process must be a name, a function or", maker, process=[3], error=TypeError),
        refused("process must be one of 'clip_filter', 'dynamic_sampling'", maker, process="top_p"),
        refused("process must be one of … got 'rejected'", maker, process=["rejected"]),
        refused("Did you mean 'top_entropy'", maker, process="top_entopy"),
        refused(TEACHER, maker, advantage="distill", teacher=STRANGER),
        *(refused(LARGE, weighing, weight) for weight in (1e300, -1e39)),
    ],
)
def test_arguments_of_makers(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        refused("objective must be one of", loss, objective="trpo"),
        refused("Did you mean 'ppo'", loss, objective="pppo"),
        refused("aggregation must be one of", loss, aggregation="median"),
        refused("clip_epsilon must be", loss, clip_epsilon=1.5),
        refused("clip_epsilon must be", loss, clip_epsilon=(0.1, -0.1)),
        refused("clip_epsilon must be", loss, objective="gmpo", clip_epsilon=-0.1),
        refused("clip_epsilon must be", loss, objective=partial(ppo, clip_epsilon=1.5)),
        refused(
            "clip_epsilon is bound to the objective",
            *(loss,),
            **{"objective": partial(ppo, clip_epsilon=0.1), "clip_epsilon": 0.1},
        ),
        refused(
            "whose clip_epsilon can be given by keyword",
            *(loss,),
            **{"objective": lambda log_prob, old, advantage, mask: (log_prob, mask)},
            error=TypeError,
        ),
        *(
            refused(f"clip_epsilon must be None for '{name}'", loss, objective=name, clip_epsilon=1)
            for name, objective in OBJECTIVES.items()
            if clip_bounds(objective) is None
        ),
        refused("correction must be one of", loss, correction="tis"),
        refused("correction must be one of", loss, correction=["geometric", "tis"]),
        *(
            refused("correction must be a name, a function", loss, correction=x, error=TypeError)
            for x in (3, [3], ["icepop", None])
        ),
        *(
            refused("correction must be None … 'sft'", loss, objective="sft", correction=kind)
            for kind in ("token_tis", "geometric", ["icepop", "token_tis"])
        ),
        *(
            refused("would apply it twice", loss, objective=objective, correction=correction)
            for objective in ("decoupled_ppo", partial(decoupled, weight_cap=2.0))
            for name in ("token_tis", "sequence_tis", "icepop", "sequence_mis")
            for correction in (name, ["geometric", partial(CORRECTIONS[name])])
        ),
        refused("sequence must be one of", loss, sequence="episode"),
        refused("sequence='turn' is for", loss, sequence="turn"),
        refused("kl_kind must be one of", loss, kl_kind="k4"),
        *(
            refused(f"{name} must be finite", loss, **{name: value})
            for name, value in product(("kl_coef", "entropy_coef"), (NAN, INF))
        ),
        *(
            refused(f"{name} must be a number", loss, **{name: value}, error=TypeError)
            for name, value in product(("kl_coef", "entropy_coef"), ("0.1", True, [0.1]))
        ),
        refused("critic must be a torch.nn.Module", loss, critic=lambda **_: 0, error=TypeError),
        refused("freeze_vision=True needs an actor with a vision", loss, freeze_vision=True),
        refused("freeze_vision must be True or False", loss, freeze_vision="no", error=TypeError),
        refused(TEACHER, lambda: loss(distillation=Distillation(STRANGER))),
        refused("distillation must be", loss, distillation=STRANGER, error=TypeError),
        refused("kind must be", Distillation, STRANGER, "backward"),
        refused("top_k", Distillation, STRANGER, top_k=0),
        refused("init_coef", EntropyController, 0.2, init_coef=2.0),
        refused("delta", EntropyController, 0.2, delta=0.0),
        refused("max_coef", EntropyController, 0.2, max_coef=-1.0),
        refused("entropy must be finite, got nan", EntropyController(0.2).update, NAN),
    ],
)
def test_arguments_of_losses(call, error, text):
    check_refused(call, error, text)


@pytest.mark.parametrize("make", [maker, loss])
def test_rows_must_be_a_tensordict(make):
    check_refused(
        lambda: make()([{"tokens": [1]}]), TypeError, "rows must be a TensorDict, got list."
    )
    said = "got NoneType: a collector with a replay_buffer yields None"
    check_refused(lambda: make()(None), TypeError, said)


# ---- rows -----------------------------------------------------------------------------------------

SAMPLED = tuple(make_rows()[MASK].nonzero()[3].tolist())
PADDED = tuple((~make_rows()["masks", "all_attention_mask"]).nonzero()[0].tolist())
TOKENS, TURNS, TO_GO = ("tokens", "full"), ("turns", "full"), ("rewards", "to_go")
LOG_PROBS, OLD, REF = (("log_probs", name) for name in ("full", "old", "ref"))
REWARDS, WEIGHTS = ("rewards", "full"), ("weights", "full")
FITS = "of rows must have shape (6, 12) to fit"
IMAGINARY = torch.ones(6, 12, dtype=torch.complex64) * 1j


def wrong(text, spoil, error=ValueError, **options):
    """A row of a table: what is said of spoiled rows, and the options of who says it."""
    return pytest.param(spoil, options, error, ".*".join(map(re.escape, text.split("…"))), id=text)


def lacks(key):
    return lambda rows: rows.exclude(key)


def has(key, value):
    return lambda rows: rows.set(key, value)


def as_type(key, dtype):
    """An entry, or that of the episodes where there is none, in another type."""
    return lambda rows: rows.set(key, rows.get(key, rows["episode"]).to(dtype))


def has_at(place, key, value):
    def spoil(rows):
        rows[key][place] = value
        return rows

    return spoil


def no_number(key, bad):
    """One sampled token has none, and none of those that are not sampled."""

    def spoil(rows):
        rows[key] = torch.where(rows[MASK], rows.get(key, torch.zeros(6, 12)), bad)
        return has_at(SAMPLED, key, bad)(rows)

    return spoil


def negated(key):
    return lambda rows: rows.set(key, -rows[key])


def nested(key):
    return has((key, "mine"), torch.ones(6))


def as_it_is(rows):
    return rows


@pytest.mark.parametrize(
    ("spoil", "options", "error", "message"),
    [
        wrong("old_log_probs='actor' does without", lacks("log_probs"), KeyError),
        wrong("lack the entry 'group'…the collector", lacks("group"), KeyError),
        wrong("lack the entry 'episode'; MergeTurns", lacks("episode"), KeyError),
        wrong("'turns', 'full'…MergeTurns writes it", lacks("turns"), KeyError),
        wrong("where the turns have ('next', 'reward'", lacks("rewards"), KeyError),
        wrong(f"{LOG_PROBS} {FITS} {TOKENS}, got (6, 3)", has(LOG_PROBS, torch.zeros(6, 3))),
        wrong(f"{REWARDS} {FITS}… got (6, 3)", has(REWARDS, torch.zeros(6, 3))),
        wrong(f"{MASK} {FITS}", has(MASK, torch.ones(6, 3).bool())),
        wrong("must be a bool tensor", has(MASK, torch.ones(6, 12)), TypeError),
        wrong("no token of these 6 rows was sampled", has(MASK, torch.zeros(6, 12).bool())),
        wrong(
            f"{MASK} must lie within ('masks', 'all_attention_mask'), "
            f"but token {PADDED[1]} of row {PADDED[0]}",
            has_at(PADDED, MASK, True),
        ),
        wrong("shape (6,) to fit 'episode', got (6, 1)", has("group", torch.zeros(6, 1).long())),
        wrong("'group' must be the same … in episode 0", has("group", torch.arange(6))),
        wrong("'valid' of rows must have shape (6,)", has("valid", torch.ones(6, 1).bool())),
        wrong("'valid' must be the same on all rows of", has("valid", torch.arange(6) != 1)),
        wrong("integers, got NonTensorStack", has("episode", NonTensorStack(*"abcdef")), TypeError),
        *(
            wrong(f"{key!r}… must hold integers, got", as_type(key, dtype), TypeError)
            for key in (TOKENS, TURNS, "episode", "episode_index", "fork", "group")
            for dtype in (torch.float32, torch.complex64)
        ),
        *(
            wrong(f"{key} of rows must hold real", has(key, IMAGINARY), TypeError, advantage=kind)
            for key, kind in ((REWARDS, "grpo"), (TO_GO, "turn"), (LOG_PROBS, "grpo"))
        ),
        *(
            wrong(
                f"{key} must be finite…got {bad} in episode 0 (row {SAMPLED[0]}, "
                f"token {SAMPLED[1]}) and 0 more",
                no_number(key, bad),
                advantage="turn",
            )
            for key in (LOG_PROBS, TO_GO)
            for bad in (NAN, INF, -INF)
        ),
        wrong("tokens must be in [0, 6), …Qwen2ForCausalLM… got", as_it_is, ref=SMALLER),
        wrong("must be log-probabilities… other sign", has(LOG_PROBS, torch.ones(6, 12))),
        *(
            wrong(text, spoil, old_log_probs="actor")
            for text, spoil in (
                ("the entry 'advantage': 'advantage' is a TensorDict there", nested("advantage")),
                ("the entry 'returns': 'returns' is a TensorDict there", nested("returns")),
                ("rows must not be locked…rows.unlock_()", lambda rows: rows.lock_()),
            )
        ),
        *(
            wrong("'entropy'; ExperienceMaker writes it with", as_it_is, KeyError, process=process)
            for process in ("top_entropy", partial(top_entropy, rho=0.1), lambda x: top_entropy(x))
        ),
    ],
)
def test_rows_for_makers(spoil, options, error, message):
    rows = spoil(make_rows())
    made = maker(**{"advantage": "grpo", **options})
    with MODEL.register_forward_pre_hook(lambda *_: pytest.fail("the model ran")):
        helpers.refused(made, rows, message, error)


@pytest.mark.parametrize(
    ("spoil", "options", "error", "message"),
    [
        *(
            wrong(f"rows lack the entry {key!r}; …{hint}", lacks(key), KeyError)
            for key, hint in (
                (TOKENS, "MergeTurns writes it from the turns'"),
                (("masks", "all_attention_mask"), "MergeTurns writes it"),
                (TURNS, "MergeTurns writes it"),
                ("group", "which the collector writes"),
                (OLD, "ExperienceMaker writes it"),
                (REF, "ExperienceMaker writes it when it has a ref"),
                (LOG_PROBS, "where the turns have"),
                ("advantage", "ExperienceMaker writes it"),
                ("returns", "ExperienceMaker writes it"),
                ("values", "ExperienceMaker writes it when it has a critic"),
            )
        ),
        *(
            wrong(
                f"{key!r} must be finite…row {SAMPLED[0]} at token {SAMPLED[1]}",
                has_at(SAMPLED, key, bad),
            )
            for key in (LOG_PROBS, OLD, REF, WEIGHTS, "advantage", "values", "returns")
            for bad in (NAN, INF)
        ),
        *(wrong(f"{key}… must be log-probabilities", negated(key)) for key in (LOG_PROBS, OLD)),
        wrong(f"{MASK}…row {PADDED[0]} at token {PADDED[1]}", has_at(PADDED, MASK, True)),
        wrong("got torch.int64; convert it with .bool", as_type(MASK, torch.long), TypeError),
        wrong(
            "('masks', 'sft') of rows must be a bool tensor, got torch.int64;",
            *(has(("masks", "sft"), torch.ones(6, 12).long()), TypeError),
            sft_coef=0.5,
        ),
    ],
)
def test_rows_for_losses(spoil, options, error, message):
    made = loss(
        critic=ValueLoss(TokenCritic(), clip_value=0.2),
        objective="gspo",
        aggregation="prompt_mean",
        correction="token_tis",
        sequence="turn",
        kl_coef=0.1,
        **options,
    )
    rows = spoil(completed_rows(MODEL, weighted=True))
    with pytest.raises(error, match=message):
        made(rows)
