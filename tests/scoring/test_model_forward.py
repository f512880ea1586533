"""A model's modes are right in every pass and given back, whatever other threads do with it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.scoring.helpers import close, tiny
from tests.waiting import PATIENCE, in_thread
from torchrl_mt.objectives import ExperienceMaker, Passes, ValueModel
from torchrl_mt.scoring.forward import _lock, run_model, scoring_mode
from torchrl_mt.testing import tiny_vl_model


class Watched(nn.Module):
    """A model that says in which mode each pass begins and ends, and waits in between."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.drop = nn.Dropout(0.5)
        self.modes = []
        self.entered = threading.Event()
        self.pause = 0.0

    def forward(self, input_ids, attention_mask=None):
        modes = [self.training]
        self.entered.set()
        threading.Event().wait(self.pause)
        logits = self.drop(self.model(input_ids=input_ids, attention_mask=attention_mask).logits)
        self.modes.append([*modes, self.training, self.model.training])
        return logits


@pytest.fixture
def watched(model):
    return Watched(model).train()


def in_threads(*works):
    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result(PATIENCE) for done in [pool.submit(work) for work in works]]


def test_threads_that_score_with_one_model_do_not_disturb_each_other(watched, rows):
    batch = rows()
    watched.pause = 0.002
    maker = ExperienceMaker(watched, old_log_probs="actor", passes=Passes(micro_batch_size=1))
    expected = maker(batch.clone())["log_probs", "old"]
    scored = in_threads(*[lambda: maker(batch.clone())["log_probs", "old"]] * 3)
    for got in scored:
        assert torch.equal(got, expected)
    assert not any(map(any, watched.modes))
    assert all(module.training for module in watched.modules())


def test_modes_are_given_back_whichever_thread_leaves_last(watched):
    watched.model.eval()
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first():
        with scoring_mode(watched):
            first_in.set()
            # Long enough for the second to come in between, if it could.
            second_in.wait(0.2)
        first_out.set()

    def second():
        first_in.wait(PATIENCE)
        with scoring_mode(watched):
            second_in.set()
            first_out.wait(PATIENCE)
            assert not any(module.training for module in watched.modules())

    in_threads(first, second)
    assert watched.training
    assert watched.drop.training
    assert not watched.model.training


def test_a_training_pass_keeps_its_mode_while_another_thread_scores(watched):
    inputs = {"input_ids": torch.arange(6).view(1, 6)}
    inside = threading.Event()
    watched.pause = 0.1

    def score():
        watched.entered.wait(PATIENCE)
        with scoring_mode(watched):
            inside.set()
            run_model(watched, inputs)

    def train():
        run_model(watched, inputs)
        inside.wait(PATIENCE)
        run_model(watched, inputs)

    in_threads(train, score)
    assert sorted(map(tuple, watched.modes)) == [(False,) * 3, (True,) * 3, (True,) * 3]


def test_a_pass_shuts_out_whoever_scores_with_what_shares_its_backbone(model):
    critic = ValueModel.from_model(model)
    came_in = []

    def try_to_come_in():
        lock = _lock(critic)
        if is_free := lock.acquire(blocking=False):
            lock.release()
        return is_free

    model.register_forward_hook(lambda *_: came_in.extend(in_threads(try_to_come_in)))
    run_model(model, {"input_ids": torch.arange(6).view(1, 6)})
    assert came_in == [False]
    assert in_threads(try_to_come_in) == [True]


def test_what_shares_a_backbone_waits_for_it(model):
    model.train()
    critic = ValueModel.from_model(model)
    entered, left = threading.Event(), []

    def outer():
        with scoring_mode(model):
            entered.set()
            threading.Event().wait(0.1)
            assert not model.model.training
            left.append("model")

    def inner():
        entered.wait(PATIENCE)
        with scoring_mode(nn.DataParallel(critic)):
            left.append("critic")

    in_threads(outer, inner)
    assert left == ["model", "critic"]
    assert all(module.training for module in [*model.modules(), *critic.modules()])


def test_scoring_nests_and_several_models_are_given_in_any_order(model, other_model):
    model.train()

    def both(*models):
        for _ in range(20):
            with scoring_mode(*models), scoring_mode(model):
                assert not model.training

    in_threads(lambda: both(model, other_model), lambda: both(other_model, model))
    assert model.training
    assert not other_model.training


def test_no_other_thread_draws_the_same_numbers_twice(watched, rows):
    watched.pause = 0.2
    maker = ExperienceMaker(watched, old_log_probs="actor")
    torch.manual_seed(0)
    scored = in_thread(lambda: maker(rows()))
    assert watched.entered.wait(PATIENCE)
    during = torch.rand(3)
    scored()
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.cat([during, after]), torch.rand(6))


def run(model, tokens, mask):
    """The output of a pass for each token, and the mask that the model was given."""
    seen = []

    def look(module, args, kwargs):
        seen.append(kwargs["attention_mask"])

    with torch.no_grad(), model.register_forward_pre_hook(look, with_kwargs=True):
        output = run_model(model, {"input_ids": tokens, "attention_mask": mask})
    return getattr(output, "logits", output), seen[0]


def critic(model):
    made = ValueModel.from_model(model)
    nn.init.normal_(made.head.weight)
    return made


CAUSAL = {
    "GPT2": lambda: tiny("GPT2"),
    "OPT": lambda: tiny("OPT", word_embed_proj_dim=16, ffn_dim=32),
    "Mistral": lambda: tiny("Mistral", sliding_window=3),
    "Gemma2": lambda: tiny("Gemma2", head_dim=8, sliding_window=3),
    "Lfm2": lambda: tiny("Lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3),
    "Qwen3Moe": lambda: tiny(
        "Qwen3Moe", moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "eager": lambda: tiny("Qwen2", attn_implementation="eager"),
    "LoRA": lambda: get_peft_model(tiny("Llama"), LoraConfig(init_lora_weights=False)).eval(),
    "ValueModel": lambda: critic(tiny("Llama")),
}


@pytest.fixture(scope="module", params=CAUSAL)
def causal(request):
    return CAUSAL[request.param]()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_causal_model_computes_rows_alike_without_a_mask_of_the_padding_behind(
    causal, lengths, seed
):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(24, mask.shape, generator=torch.Generator().manual_seed(seed))
    output, given_mask = run(causal, tokens, mask.long())
    assert given_mask is None
    expected = causal(input_ids=tokens, attention_mask=mask.long())
    close([output[mask]], [getattr(expected, "logits", expected)[mask]])


@pytest.mark.parametrize("mask", [[[0, 1, 1], [1, 1, 1]], [[1, 0, 1], [1, 1, 0]]])
def test_a_mask_of_padding_elsewhere_is_given_to_a_causal_model(model, mask):
    mask = torch.tensor(mask)
    _, given_mask = run(model, torch.ones_like(mask), mask)
    assert torch.equal(given_mask, mask)


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: tiny("Bert", is_decoder=False),
        lambda: tiny("Bloom"),
        lambda: Watched(tiny("Llama")),
        lambda: tiny_vl_model()[0],
    ],
    ids=["attends to what follows", "tells nothing", "not of transformers", "with images"],
)
def test_a_mask_of_the_padding_behind_is_given_to_other_models(make_model):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    _, given_mask = run(make_model(), torch.ones_like(mask), mask)
    assert torch.equal(given_mask, mask)
