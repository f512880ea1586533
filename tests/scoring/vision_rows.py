"""Random training rows with images, and what transformers itself computes from them."""

import copy
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.scoring.helpers import entries
from torchrl_mt.testing import tiny_vl_model
from torchrl_mt.vision import StoredImage
from torchrl_mt.vision.rows import COUNT, FIRST, GRIDS, PIXELS, RAW

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")
_WORDS = ["what", "is", "red", "green", "left", "up", "go", "stop", "yes", "no", "<end>", "<user>"]


@cache
def built(family):
    torch.manual_seed(0)
    model, processor = tiny_vl_model(family, text_config={"initializer_range": 0.3})
    return model, processor


def vl_model(family):
    """A model of a family, the same each time; tests may change it."""
    model, processor = built(family)
    return copy.deepcopy(model), processor


class Row(NamedTuple):
    inputs: dict
    images: tuple


def picture(generator):
    height, width = (8 * torch.randint(1, 4, (2,), generator=generator)).tolist()
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return StoredImage.of(np.asarray(pixels))


def row_of(processor, images, generator):
    """Random words around images, as the processor itself prepares them."""
    mark = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
    mark = mark.removeprefix("<user> ").removesuffix("<end>")
    text = ""
    for slot in range(len(images) + 1):
        count = int(torch.randint(1, 4, (1,), generator=generator))
        words = torch.randint(0, len(_WORDS), (count,), generator=generator).tolist()
        text += " ".join(_WORDS[w] for w in words) + (mark if slot < len(images) else "")
    given = {"images": [image.array() for image in images]} if images else {}
    return Row(dict(processor(text=[text], return_tensors="pt", **given)), tuple(images))


def own_logits(model, row):
    """Transformers' own forward of the row alone, with its own positions."""
    logits = model(**row.inputs).logits[0].double()
    config = model.config
    for name in ("image_token_id", "video_token_id"):
        if getattr(config, name, None) is not None:
            logits = logits.index_fill(-1, torch.tensor(getattr(config, name)), -torch.inf)
    return logits


def rows_with_images(family, counts, seed=0):
    """Rows whose padding lies anywhere, with ``counts`` images each; and each row as prepared alone.

    Padding has any tokens, those of images among them.
    """
    g = torch.Generator().manual_seed(seed)
    model, processor = built(family)
    alone = [row_of(processor, [picture(g) for _ in range(count)], g) for count in counts]
    lengths = [row.inputs["input_ids"].shape[1] for row in alone]
    n, s = len(alone), max(lengths) + 3
    tokens = torch.randint(0, len(processor.tokenizer), (n, s), generator=g)
    attended, sampled = torch.zeros(n, s).bool(), torch.zeros(n, s).bool()
    for k, (row, length) in enumerate(zip(alone, lengths, strict=True)):
        where = torch.randperm(s, generator=g)[:length].sort().values
        ids = row.inputs["input_ids"][0]
        tokens[k, where], attended[k, where] = ids, True
        free = ids != model.config.image_token_id
        sampled[k, where] = free & (torch.rand(length, generator=g) < 0.6)
        sampled[k, where[-1]] = True
    turns = torch.where(attended, 0, -1)
    rows = TensorDict(
        {
            "tokens": {"full": tokens},
            "masks": {"all_attention_mask": attended, "all_assistant_mask": sampled},
            "turns": {"full": turns},
            "log_probs": {"full": torch.where(sampled, -2.0, 0.0)},
            "rewards": {"full": torch.zeros(n, s)},
            "episode": torch.arange(n),
            "group": torch.arange(n) // 2,
        },
        [n],
    )
    last = torch.where(sampled, torch.arange(s), -1).amax(-1, keepdim=True)
    rows["rewards", "full"].scatter_(1, last, torch.rand(n, 1, generator=g))
    return with_table(rows, alone), alone


def with_table(rows, alone):
    """Write the table of all images, which does not have them in the order of the rows."""
    count = torch.tensor([len(row.images) for row in alone])
    order = list(reversed(range(len(alone))))
    first, at = torch.zeros_like(count), 0
    for k in order:
        first[k], at = at, at + int(count[k])
    shown = [alone[k].inputs for k in order if alone[k].images]
    rows[FIRST], rows[COUNT] = first, count
    rows[RAW] = NonTensorStack(*(row.images for row in alone))
    if shown:
        pixels = torch.cat([inputs["pixel_values"] for inputs in shown])
        rows[PIXELS] = NonTensorData(pixels, batch_size=rows.batch_size)
        if "image_grid_thw" in shown[0]:
            grids = torch.cat([inputs["image_grid_thw"] for inputs in shown])
            rows[GRIDS] = NonTensorData(grids, batch_size=rows.batch_size)
    return rows


def by_transformers(model, rows, alone, temperature=1.0):
    """Log-probabilities and entropies of each row alone."""
    tokens, attended, sampled = entries(rows)
    shape = tokens.shape
    places, log_probs, entropies = [], [], []
    for k, row in enumerate(alone):
        log_p = (own_logits(model, row) / temperature).log_softmax(-1)
        plain = torch.where(log_p.isfinite(), log_p, 0.0)
        entropy = -(log_p.exp() * plain).sum(-1)
        for i, t in enumerate(attended[k].nonzero().squeeze(-1).tolist()):
            if i and sampled[k, t]:
                places.append(k * shape[1] + t)
                log_probs.append(log_p[i - 1, tokens[k, t]])
                entropies.append(entropy[i - 1])
    out = []
    for values in (log_probs, entropies):
        flat = torch.zeros(tokens.numel(), dtype=torch.float64)
        out.append(flat.index_copy(0, torch.tensor(places), torch.stack(values)).view(shape))
    return out
