"""The same results on a CUDA device as on the CPU."""

from __future__ import annotations

import asyncio
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tests.buffers import buffer_of
from tests.collectors.runs import collecting
from tests.settings import grouped
from tests.waiting import until
from torchrl_mt.collectors import Limits
from torchrl_mt.data import (
    ClipSampler,
    EpisodeSampler,
    EpisodeStorage,
    EpisodeWriter,
    PrioritizedClipSampler,
)
from torchrl_mt.datasets import RunCheckpoint
from torchrl_mt.devices import on_cpu
from torchrl_mt.engines import TransformersEngine
from torchrl_mt.engines.sampling import Sampling
from torchrl_mt.envs import GuessNumber
from torchrl_mt.objectives import (
    Advantage,
    Distillation,
    ExperienceMaker,
    MultiTurnLoss,
    Passes,
    ValueModel,
)
from torchrl_mt.objectives.functional import group_advantage, masked_gae, masked_returns
from torchrl_mt.testing import tiny_chat_model
from torchrl_mt.transforms import DiscountedReturn, MergeTurns

from .engines import test_images
from .engines.test_families import FAMILIES, build, play_turns
from .engines.test_sampling import rows_are_truncated
from .objectives.conftest import make_model, make_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def episodes(lengths: list[int]) -> TensorDict:
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])[:, None]
    seen, reward = torch.randn(len(done) + 1, 3), torch.randn(len(done), 1)
    ends = {"observation": seen[1:], "reward": reward, "done": done}
    return TensorDict({"observation": seen[:-1], "next": ends}, [len(done)])


def gpu_buffer(sampler: Any, **kwargs: Any) -> Any:
    return buffer_of(EpisodeStorage(100, device="cuda"), sampler, batch_size=8, **kwargs)


def test_tensors_of_any_layout_come_in_one_copy():
    numbers = torch.arange(24, dtype=torch.float64, device="cuda").view(4, 6)
    given = [numbers[:, 1], numbers[::2, ::3], numbers.t(), numbers[0, 0] > 0, torch.tensor(5)]
    for got, x in zip(on_cpu(*given), given, strict=True):
        assert torch.equal(got, x.cpu())


def test_masked_functions_agree_with_the_cpu():
    torch.manual_seed(0)
    reward, value = torch.randn(2, 8, 50)
    mask = torch.rand(8, 50) < 0.4
    group = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
    for function in (
        lambda reward, value, mask, group: masked_gae(reward, value, mask, 0.9, 0.8),
        lambda reward, value, mask, group: [masked_returns(reward, mask, 0.9)],
        lambda reward, value, mask, group: [group_advantage(reward[:, 0], group, "grpo")],
    ):
        on_gpu = function(*(x.cuda() for x in (reward, value, mask, group)))
        for got, expected in zip(on_gpu, function(reward, value, mask, group), strict=True):
            torch.testing.assert_close(got.cpu(), expected)


@pytest.mark.parametrize(
    "sampler", [ClipSampler(slice_len=4), PrioritizedClipSampler(slice_len=4), EpisodeSampler()]
)
def test_a_storage_on_the_gpu_gives_what_was_written(sampler):
    torch.manual_seed(0)
    data = episodes([7, 5, 9])
    buffer = gpu_buffer(sampler, writer=EpisodeWriter(transform=DiscountedReturn(0.9)))
    buffer.extend(data)
    stored = buffer[:]
    assert stored["observation"].is_cuda
    for key in ("observation", ("next", "observation")):
        assert torch.equal(stored[key].cpu(), data[key])
    expected = DiscountedReturn(0.9)(data.clone())["next", "return"]
    torch.testing.assert_close(stored["next", "return"].cpu(), expected)
    assert buffer.sample()["observation"].is_cuda


SAMPLERS = {
    "clips": ClipSampler(slice_len=4),
    "rows": ClipSampler(slice_len=4, layout="clips"),
    "stride": ClipSampler(slice_len=2, stride=2),
    "short": ClipSampler(slice_len=8, strict_length=False),
    "episodes": EpisodeSampler(),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_sampling_does_not_wait_for_the_gpu(kind, cls):
    buffer = gpu_buffer(SAMPLERS[kind], cls=cls)
    buffer.extend(episodes([7, 5, 9]))
    buffer.sample()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample = buffer.sample()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert sample["observation"].is_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_tokens_are_drawn_on_the_gpu_from_what_sorting_keeps(dtype, spread):
    cuts = [Sampling(), Sampling(top_k=50), Sampling(top_p=0.9), Sampling(1.0, 1000, 0.5, 0.01)]
    rows_are_truncated(49_152, dtype, spread, 0.3, cuts, seed=1, device="cuda")


def test_conversations_on_the_gpu():
    storage = EpisodeStorage(20, device="cuda", max_tokens=100)
    history, turns = torch.arange(40), []
    for t in range(3):
        cut, end = 3 + 8 * t, 7 + 8 * t + t % 2
        tokens = {"prompt": history[:cut], "response": history[cut:end]}
        turns.append(TensorDict({"tokens": tokens, "next": {"done": torch.tensor([t == 2])}}))
    for _ in range(9):
        storage.append(lazy_stack(turns))
    assert storage.growing_keys == [("tokens", "prompt")]
    for key in ("prompt", "response"):
        stored = storage.episode(-1).get(("tokens", key), as_list=True)
        assert all(value.is_cuda for value in stored)
        for value, turn in zip(stored, turns, strict=True):
            assert torch.equal(value.cpu(), turn["tokens", key])


def test_a_model_on_the_gpu_plays_and_learns(model, tokenizer):
    model.cuda()
    sampler, writer = (
        EpisodeSampler(replacement=False),
        EpisodeWriter(transform=DiscountedReturn(0.9)),
    )
    transform = MergeTurns(pad_token_id=tokenizer.pad_token_id)
    buffer = buffer_of(1000, sampler, writer=writer, transform=transform, batch_size=32)
    limits = Limits(max_turns=5, max_response_tokens=3)
    options = {"n": 32, "total_episodes": 64, "limits": limits, "replay_buffer": buffer}
    with (
        closing(TransformersEngine(model, tokenizer)) as engine,
        collecting(GuessNumber(16, 5), engine, **options) as collector,
    ):
        maker = ExperienceMaker(model, advantage="turn", old_log_probs="actor")
        for update, _ in enumerate(collector):
            rows = maker(buffer.sample().to("cuda"))
            mask = rows["masks", "all_assistant_mask"]
            assert (rows["versions", "full"][mask] == update).all()
            sampled, scored = rows["log_probs", "full"][mask], rows["log_probs", "old"][mask]
            torch.testing.assert_close(sampled, scored, atol=1e-3, rtol=0)
            MultiTurnLoss(model)(rows)["loss_objective"].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
            collector.update_policy_weights_(model)
            buffer.empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_sampled_from_on_the_gpu_as_they_are(family):
    play_turns(build(*FAMILIES[family]).cuda(), atol=1e-3)


@pytest.mark.parametrize("name", test_images.FAMILIES)
async def test_images_are_seen_on_the_gpu_as_they_are(name):
    family = test_images.Family(name)
    family.model.cuda()
    shown = [[4], [], [0, 3], [4, 1]]
    with closing(family.engine(max_batch_tokens=24)) as engine:
        answers = await asyncio.gather(*(family.ask(engine, each) for each in shown))
        for each, answer in zip(shown, answers, strict=True):
            family.assert_sampled(family.message(each), each, answer, atol=1e-3)


async def test_an_engine_follows_a_model_to_the_gpu_and_back(model, tokenizer):
    with closing(TransformersEngine(model, tokenizer)) as engine:
        engine._stop_ids = frozenset()
        task = asyncio.create_task(engine.generate([5, 6, 7], max_new_tokens=300))
        for move in (model.cuda, model.cpu, model.cuda):
            before = engine.stats()["generated_tokens"]
            await until(lambda: engine.stats()["generated_tokens"] >= before + 30)  # noqa: B023
            with engine._generation.paused():
                move()
        answer = await task
    ids = torch.tensor([[5, 6, 7, *answer.token_ids]], device="cuda")
    with torch.no_grad():
        expected = model.eval()(ids).logits[0, 2:-1].log_softmax(-1)
    expected = expected.gather(-1, ids[0, 3:, None])[:, 0].cpu()
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-3, rtol=0)


async def test_an_update_splits_answers_under_way_on_the_gpu(model, tokenizer):
    model.cuda()
    with closing(TransformersEngine(model, tokenizer)) as engine:
        engine._stop_ids = frozenset()
        answers = (engine.generate([5, 6, 7], max_new_tokens=300) for _ in range(8))
        tasks = [asyncio.create_task(answer) for answer in answers]
        await until(lambda: engine.stats()["generated_tokens"] >= 8 * 30)
        assert not any(task.done() for task in tasks)
        await asyncio.to_thread(engine.update_weights)
        for answer in await asyncio.gather(*tasks):
            assert len(answer.token_ids) == 300
            assert set(answer.versions) == {0, 1}


@pytest.mark.parametrize(("saved_on", "loaded_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_loads_on_another_device(saved_on, loaded_on, tmp_path):
    def buffer(device):
        storage, sampler = EpisodeStorage(100, device=device), PrioritizedClipSampler(slice_len=2)
        return buffer_of(storage, sampler, cls=TensorDictReplayBuffer, batch_size=8)

    torch.manual_seed(0)
    rb, other = buffer(saved_on), buffer(loaded_on)
    data = episodes([5, 4, 7, 3])
    rb.extend(data[:-1])
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    assert other.storage.device.type == loaded_on
    assert other.sample().device.type == loaded_on
    other.extend(data[-1:])
    assert other.storage.lengths.tolist() == [5, 4, 7, 3]
    torch.testing.assert_close(other[:].cpu()["observation"], data["observation"], rtol=0, atol=0)
    other.load_state_dict(rb.state_dict())
    assert other[:].device.type == loaded_on
    torch.testing.assert_close(other[:].cpu()["observation"], data["observation"][:16])


@pytest.mark.parametrize(("saved_on", "given_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_generator_of_another_device_is_refused(saved_on, given_on, tmp_path):
    RunCheckpoint(tmp_path).save(1, noise=torch.Generator(saved_on))
    given = torch.Generator(given_on)
    before = given.get_state()
    with pytest.raises(ValueError, match="part 'noise' cannot be restored from"):
        RunCheckpoint(tmp_path).restore(noise=given)
    assert torch.equal(given.get_state(), before)


def test_a_restored_run_goes_on_as_it_would_have(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout()).cuda()
        noise = torch.Generator("cuda").manual_seed(seed)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "noise": noise}

    def update(run):
        x = torch.randn(16, 4, device="cuda", generator=run["noise"])
        loss = (run["model"](x) - torch.rand(16, 8, device="cuda")).square().mean()
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        return loss.item()

    first, second = make(0), make(1)
    update(first), update(second)
    RunCheckpoint(tmp_path).save(1, **first)
    expected = [update(first) for _ in range(3)]
    assert RunCheckpoint(tmp_path).restore(**second) == 1
    assert [update(second) for _ in range(3)] == expected


def test_functions_of_rows_may_answer_on_any_device():
    model, rows = make_model(), make_rows()
    weight = torch.arange(1.0, 1 + len(rows))
    number = torch.randn(rows["tokens", "full"].shape)
    answers = {
        "reward": lambda rows: weight,
        "reward_transform": lambda reward, mask: number,
        "advantage": lambda rows: number,
    }
    expected = ExperienceMaker(model, **grouped(**answers))(rows.clone())
    made = ExperienceMaker(model.cuda(), **grouped(**answers))(rows.cuda())
    for key in (("rewards", "shaped"), "advantage"):
        assert made[key].is_cuda
        torch.testing.assert_close(made[key].cpu(), expected[key])


def test_an_engine_of_a_split_model_names_its_devices():
    model, tokenizer = tiny_chat_model(["guess"])
    model.lm_head.cuda()
    text = r"must be on one device, got a \w+ on \['cpu', 'cuda:0'\]"
    with pytest.raises(ValueError, match=text):
        TransformersEngine(model, tokenizer)


def test_the_pages_functions_of_rows_run_where_the_rows_are():
    page = (Path(__file__).parents[1] / "docs" / "learning.rst").read_text()
    start = page.index("   def only_groups_with_spread(rows):")
    names = {"torch": torch}
    exec(textwrap.dedent(page[start : page.index("   maker = ", start)]), names)
    functions = [names["only_groups_with_spread"], names["shorter_is_better"]]
    rows = make_rows(n=9)
    expected = ExperienceMaker(make_model(), process=functions)(rows.clone())
    made = ExperienceMaker(make_model().cuda(), process=functions)(rows.cuda())
    torch.testing.assert_close(made["advantage"].cpu(), expected["advantage"])


@pytest.mark.parametrize("packed", [False, True, "tree"])
def test_teachers_critics_and_trees_agree_with_the_cpu(packed):
    def train(device: str) -> list[torch.Tensor]:
        actor, teacher = make_model().to(device), make_model(1).to(device)
        critic = ValueModel.from_model(make_model(2)).to(device)
        rows = make_rows().to(device)
        rows["next", "truncated"] = torch.ones_like(rows["episode"], dtype=torch.bool)
        rows["masks", "sft"] = rows["masks", "all_attention_mask"].clone()
        passes = Passes(packed=packed, head_dtype=torch.float32)
        advantage = Advantage("gae", bootstrap=True, critic_lmbda=1.0)
        scored = {"teacher": teacher, "critic": critic, "old_log_probs": "actor"}
        maker = ExperienceMaker(actor, advantage=advantage, passes=passes, **scored)
        terms = {"distillation": Distillation(teacher, "jsd", top_k=5), "sft_coef": 0.1}
        losses = MultiTurnLoss(actor, objective="dppo_kl", passes=passes, **terms)(maker(rows))
        names = ("loss_objective", "loss_distill", "loss_sft")
        sum(losses[name] for name in names).backward()
        gradients = [p.grad.flatten().cpu() for p in actor.parameters()]
        return [*(losses[name].detach().cpu() for name in names), torch.cat(gradients)]

    for got, expected in zip(train("cuda"), train("cpu"), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["gigpo", "gdpo", "otb", "pass_at_k"])
def test_comparisons_agree_with_the_cpu(kind):
    found = []
    for device in ("cuda", "cpu"):
        rows = make_rows().to(device)
        rows["group"] = torch.zeros_like(rows["group"])
        found.append(ExperienceMaker(make_model().to(device), advantage=kind)(rows)["advantage"])
    torch.testing.assert_close(found[0].cpu(), found[1])
