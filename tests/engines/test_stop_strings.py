"""Stop strings end an answer where its decoded text first contains one, however tokens spell it."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engines.helpers import outcomes, prompts
from tests.tiers import few_or_many
from torchrl_mt.chat.encoding import decode
from torchrl_mt.engines import Completion, TransformersEngine
from torchrl_mt.engines.stop_strings import StopStrings, find_stop
from torchrl_mt.testing import tiny_chat_tokenizer

PIECES = ["a", "b", "ab", " a", "\n", "\n\n", "é", "你", "好", "🙂", " 🙂b", "#"]


def byte_level():
    """Tokens are bytes and runs of bytes, which cut characters anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    spelt = [backend.encode(piece).tokens for piece in PIECES]
    parts = {
        "".join(t[i:j]) for t in spelt for i in range(len(t)) for j in range(i + 1, len(t) + 1)
    }
    parts |= {"".join(one[-2:] + other[:2]) for one in spelt for other in spelt}
    for part in sorted(parts - vocabulary.keys()):
        vocabulary[part] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return backend, [vocabulary[part] for part in sorted(parts)]


def byte_fallback():
    """Tokens are words with their space, or bytes of what is no word; the first space is dropped."""
    words = [piece.replace(" ", "▁") for piece in PIECES if piece not in ("你", "好")] + ["▁"]
    used = sorted({f"<0x{byte:02X}>" for byte in "你好é".encode()})
    vocabulary = {token: i for i, token in enumerate([*words, *used])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)])
    return backend, list(vocabulary.values())


def tokenizer_of(kind):
    if kind == "words":
        tokenizer = tiny_chat_tokenizer("a b ab # é 你 好")
        return tokenizer, list(range(len(tokenizer)))
    backend, tokens = {"byte-level": byte_level, "byte-fallback": byte_fallback}[kind]()
    return PreTrainedTokenizerFast(tokenizer_object=backend), tokens


def ended(tokens, strings, decode_tokens):
    """Slow reference: decode everything after every token."""
    for n in range(1, len(tokens) + 1):
        found = find_stop(decode_tokens(tokens[:n]), strings)
        if found is not None:
            return n, found
    return None, None


def counting(decode_tokens, seen):
    def counted(tokens):
        seen.append(len(tokens))
        return decode_tokens(tokens)

    return counted


@pytest.mark.parametrize("kind", ["words", "byte-level", "byte-fallback"])
@few_or_many(60, 500)
def test_an_answer_ends_where_its_text_first_contains_a_string(kind, examples):
    tokenizer, tokens = tokenizer_of(kind)
    decode_tokens = partial(decode, tokenizer)
    rng, num_found = random.Random(0), 0
    for _ in range(examples):
        # A few tokens without text among them.
        few = [*rng.sample(tokens, rng.randint(2, min(12, len(tokens)))), 10**6]
        answer = rng.choices(few, k=rng.randint(1, 120))
        text = decode_tokens(rng.choices(few, k=9)).replace("\ufffd", "") + "ab"
        begin = rng.randrange(len(text) - 1)
        strings = [text[begin : begin + rng.randint(1, 6)], *rng.sample(PIECES, rng.randrange(3))]
        strings.append("a" * rng.randint(3, 6))
        stops = StopStrings(strings, decode_tokens)
        size = next((n for n, token in enumerate(answer, 1) if stops.ended_by(token)), None)
        assert (size, stops.found) == ended(answer, strings, decode_tokens), (answer, strings)
        num_found += size is not None
    assert examples // 3 < num_found < examples


@pytest.mark.parametrize("kind", ["words", "byte-level", "byte-fallback"])
def test_a_token_costs_the_decoding_of_a_few_tokens_only(kind):
    tokenizer, tokens = tokenizer_of(kind)
    seen: list[int] = []
    stops = StopStrings(["never"], counting(partial(decode, tokenizer), seen))
    rng = random.Random(0)
    answers = [rng.choices(tokens, k=500) for _ in range(2)]
    for token in [*answers[0], *[tokens[0]] * 500, *[10**6] * 500, *answers[1]]:
        assert not stops.ended_by(token)
    assert max(seen) < 100
    assert len(seen) < 3 * 2000


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("lead", range(8))
def test_characters_that_tokens_share_are_found_wherever_the_tail_was_cut(kind, lead):
    tokenizer, _ = tokenizer_of(kind)
    vocabulary = tokenizer.get_vocab()
    spelt = {char: char for char in "ab"}
    if kind == "byte-level":
        encoded = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("你好")[0][0]
        spelt |= {"你": encoded[:3], "好": encoded[3:]}
    else:
        spelt |= {char: [f"<0x{byte:02X}>" for byte in char.encode()] for char in "你好"}
    text = "ab" * lead + "你好" * 50 + "你你"
    answer = [vocabulary[token] for char in text for token in spelt[char]]
    stops = StopStrings(["你你"], partial(decode, tokenizer))
    assert [stops.ended_by(token) for token in answer] == [False] * (len(answer) - 1) + [True]


def test_a_space_that_the_beginning_of_an_answer_drops_counts_afterwards():
    tokenizer, _ = tokenizer_of("byte-fallback")
    space = tokenizer.get_vocab()["▁"]
    stops = StopStrings(["  "], partial(decode, tokenizer))
    assert [stops.ended_by(space) for _ in range(3)] == [False, False, True]


def test_bytes_that_never_become_a_character_are_not_decoded_again_and_again():
    tokenizer, _ = tokenizer_of("byte-level")
    stray = tokenizer.get_vocab()["ł"]  # a byte that continues a character
    assert decode(tokenizer, [stray]) == "\ufffd"
    seen: list[int] = []
    stops = StopStrings(["ab"], counting(partial(decode, tokenizer), seen))
    assert not any(stops.ended_by(stray) for _ in range(2000))
    assert max(seen) < 200
    assert [stops.ended_by(tokenizer.get_vocab()[char]) for char in "ab"] == [False, True]


def test_a_stop_string_cuts_an_answer_and_changes_nothing_before(model, tokenizer):
    """Also where requests go back to the queue for lack of room, and weights change on the way."""
    engine = TransformersEngine(model, tokenizer, max_new_tokens=40, cache_tokens=160, seed=0)
    strings = ["r 1", " 7"]

    async def ask(**kwargs):
        answers = asyncio.gather(
            *(engine.generate(p, seed=i, **kwargs) for i, p in enumerate(prompts(12)))
        )
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.update_weights)
        return await answers

    whole, cut = asyncio.run(ask()), asyncio.run(ask(stop=strings))
    sizes = []
    for plain, answer in zip(whole, cut, strict=True):
        size, found = ended(plain.token_ids, strings, partial(decode, tokenizer))
        sizes.append(size)
        assert answer.token_ids == plain.token_ids[:size]
        assert answer.log_probs == pytest.approx(plain.log_probs[:size], abs=1e-5)
        assert answer.stop_string == found
    assert None in sizes
    assert len(set(sizes)) > 3


def test_a_tokenizer_that_fails_ends_its_own_request_alone(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: 1 / 0)
    answers = outcomes(engine, prompts(6), [{}] * 3 + [{"stop": "higher"}] * 3)
    assert [type(answer) for answer in answers] == [Completion] * 3 + [RuntimeError] * 3
    assert all(isinstance(error.__cause__, ZeroDivisionError) for error in answers[3:])
    monkeypatch.undo()
    assert asyncio.run(engine.generate([5], stop="higher")).token_ids
