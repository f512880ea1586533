"""What the engine's tests share: prompts, slow references, and models that differ."""

from __future__ import annotations

import asyncio
import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.waiting import PATIENCE
from torchrl_mt.engines import CompletionsEngine, TransformersEngine


def check(promise, examples: int, **strategies) -> None:
    """Look for examples that break a promise; what is no strategy is the same in all of them."""
    drawn = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in strategies.items()
    }
    settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(
        given(**drawn)(promise)
    )()


def prompts(count: int, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, 26, (count, length), generator=generator).tolist()


def generate_all(engine, requests, each=None, **kwargs):
    """Answers to requests at the same time; ``each`` may have arguments of its own."""
    found = outcomes(engine, requests, each, **kwargs)
    for failed in (outcome for outcome in found if isinstance(outcome, BaseException)):
        raise failed
    return found


def outcomes(engine, requests, each=None, **kwargs):
    """As ``generate_all``, with errors in the place of answers."""

    async def run():
        asked = zip(requests, each or [{}] * len(requests), strict=True)
        answers = (engine.generate(prompt, **kwargs, **more) for prompt, more in asked)
        return await asyncio.gather(*answers, return_exceptions=True)

    return asyncio.run(run())


def plain_log_probs(model, prompt, answer) -> torch.Tensor:
    """The slow and obvious reference: one plain forward pass over prompt and answer."""
    log_probs = plain_logits(model, prompt, answer).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def plain_logits(model, prompt, answer) -> torch.Tensor:
    """The logits that each token of an answer was drawn from."""
    ids = torch.tensor([[*prompt, *answer.token_ids]], device=model.device)
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(ids).logits[0]
    model.train(was_training)
    return logits[len(prompt) - 1 : -1].float().cpu()


async def until(condition) -> None:
    """Wait for a condition while the event loop goes on."""
    while not condition():
        await asyncio.sleep(0.0005)


def idle(engine) -> bool:
    """Whether nothing is under way and no request holds a place in the cache."""
    stats = engine.stats()
    return not (stats["running"] or stats["waiting"] or stats["cache_tokens"])


def held(engine):
    """No step is taken meanwhile."""
    return engine._generation.paused()


def changed_copy(model):
    """The model with other weights."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return changed


def endless(model, tokenizer, **kwargs):
    """An engine whose answers end at their limit only."""
    engine = TransformersEngine(model, tokenizer, **kwargs)
    engine._stop_ids = frozenset()
    return engine


def completions(urls, tokenizer, model="tiny", **kwargs):
    """An engine of servers, which asks again at once and waits as long as it must."""
    kwargs = {"backoff": 0.01, "timeout": PATIENCE, "max_new_tokens": 20, **kwargs}
    return CompletionsEngine(urls, model, tokenizer, **kwargs)


def assert_sampled_by(models, prompt, answer, atol=1e-5) -> None:
    """Each log-probability is that of the model; of several, of the one of the token's version."""
    models = models if isinstance(models, list) else [models]
    versions = torch.tensor(list(answer.versions)) % len(models)
    under = torch.stack([plain_log_probs(model, prompt, answer) for model in models])
    found, expected = torch.tensor(answer.log_probs), under.gather(0, versions[None])[0]
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def assert_all_sampled_by(models, requests, answers, atol=1e-5) -> None:
    for prompt, answer in zip(requests, answers, strict=True):
        assert_sampled_by(models, prompt, answer, atol)


def sampled(engine, models, requests, **kwargs):
    """Answers whose log-probabilities are those of the model."""
    answers = generate_all(engine, requests, **kwargs)
    assert_all_sampled_by(models, requests, answers)
    return answers


def started(engine, requests, **kwargs) -> list[asyncio.Task]:
    """Requests that are under way."""
    return [asyncio.create_task(engine.generate(prompt, **kwargs)) for prompt in requests]


def ask(engine, prompt=(5, 6), **kwargs):
    """One answer, which must come in time."""

    async def run():
        return await asyncio.wait_for(engine.generate(list(prompt), **kwargs), PATIENCE)

    return asyncio.run(run())


DROP = object()
"""Stands for no value."""


def edited(path, value):
    """A change of one field of a JSON answer; a function makes its value of the one before."""
    *parents, last = path

    def change(answer):
        inner = answer
        for name in parents:
            inner = inner[name]
        if value is DROP:
            del inner[last]
        else:
            inner[last] = value(inner[last]) if callable(value) else value
        return answer

    return change


def scripts(openings, longest: int):
    """Actions upon an engine: each has a name, what a prompt shows, and a number."""
    none, place = st.just([]), st.integers(0, 20)
    actions = st.one_of(
        st.tuples(st.just("ask"), openings, st.integers(1, longest)),
        st.tuples(st.just("update"), none, st.just(0)),
        st.tuples(st.just("wait"), none, st.integers(1, 8)),
        st.tuples(st.just("cancel"), none, place),
        st.tuples(st.just("go on"), openings, place),
    )
    return st.lists(actions, min_size=4, max_size=25)


def each_version_is_its_own(script, family, **sizes) -> None:
    """Every log-probability is that of its version's weights alone, whatever happens when.

    Prompts are shared, caches full, requests cancelled, requeued and interrupted by new weights.
    """
    versions = family.versions
    engine = family.endless(share_weights=False, **sizes)
    asked: list[tuple[list[int], list[int], asyncio.Task]] = []

    def ask(prompt, shown, length):
        if len(prompt) + length <= engine.max_total_tokens:
            request = engine.generate(prompt, max_new_tokens=length, **family.given(shown))
            asked.append((prompt, shown, asyncio.create_task(request)))

    async def run():
        for name, shown, number in script:
            if name == "ask":
                ask(family.message(shown), shown, number)
            elif name == "update":
                source = versions[(engine.version + 1) % len(versions)]
                await asyncio.to_thread(engine.update_weights, source)
            elif name == "wait":
                await asyncio.sleep(number * 0.002)
            elif asked:
                prompt, before, task = asked[number % len(asked)]
                if name == "cancel":
                    task.cancel()
                elif not task.cancelled():
                    answer = (await task).token_ids
                    ask([*prompt, *answer, *family.message(shown)], before + shown, 5)
        await asyncio.gather(*(task for *_, task in asked), return_exceptions=True)
        await until(lambda: idle(engine))

    asyncio.run(run())
    engine.close()
    for prompt, shown, task in asked:
        if task.cancelled():
            continue
        answer = task.result()
        stamps = torch.tensor(answer.versions)
        assert (stamps.diff() >= 0).all()
        assert stamps.max() <= engine.version
        under = torch.stack([family.log_probs(m, prompt, shown, answer) for m in versions])
        expected = under.gather(0, (stamps % len(versions))[None])[0]
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)
