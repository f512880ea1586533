"""LoRA trained while games are played and scored: log-probabilities are those of their versions."""

import copy

import pytest
import torch

from tests.adapters import lora
from tests.objectives.helpers import MASK, WORDS, log_probs
from torchrl_mt.collectors import Limits, MultiTurnCollector
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import ExperienceMaker, ExperiencePipeline, MultiTurnLoss
from torchrl_mt.testing import tiny_chat_model


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 1])
def test_a_run_is_exact_in_its_versions(max_staleness):
    torch.manual_seed(0)
    base, tokenizer = tiny_chat_model(WORDS)
    engine = TransformersEngine(base, tokenizer, share_weights=False, seed=0)
    actor = lora(base)
    frozen = {n: p.detach().clone() for n, p in actor.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.Adam([p for p in actor.parameters() if p.requires_grad], lr=1e-2)
    options = {"old_log_probs": "actor", "advantage": "grpo", "kl_coef": 0.01}
    maker = ExperienceMaker(actor, ref="base", **options)
    loss_module = MultiTurnLoss(actor, correction="token_tis")
    collector = MultiTurnCollector(
        GuessNumber(8, 3, prompt="guess 1 to {numbers}"),
        engine,
        GuessNumber.data(numbers=8),
        episodes_per_batch=8,
        group_size=4,
        total_episodes=48,
        limits=Limits(max_turns=3, max_response_tokens=4),
        max_staleness=max_staleness,
    )
    batches, actors = 0, {}

    def version():
        return collector.policy_version

    def publish():
        collector.update_policy_weights_(actor)
        actors[version()] = copy.deepcopy(actor)

    publish()
    with collector, ExperiencePipeline(collector, maker, version=version) as pipeline:
        for rows in pipeline:
            batches += 1
            sampled, made_by = rows[MASK], rows["versions", "full"]
            scored_by = int(rows["versions", "scored"][0])
            assert version() - scored_by == maker.metrics["staleness/scored"] <= 1
            assert int(made_by[sampled].min()) >= scored_by - (2 if max_staleness else 1)
            of = {v: log_probs(a, rows) for v, a in actors.items()}
            torch.testing.assert_close(rows["log_probs", "old"], of[scored_by], rtol=0, atol=1e-6)
            for v in made_by[sampled].unique().tolist():
                at = sampled & (made_by == v)
                got = rows["log_probs", "full"][at]
                torch.testing.assert_close(got, of[v][at], rtol=0, atol=1e-4)
            actor.zero_grad()
            loss_module(rows)["loss_objective"].backward()
            optimizer.step()
            publish()
    engine.close()
    assert batches == 6
    assert all(torch.equal(actor.get_parameter(name), value) for name, value in frozen.items())
