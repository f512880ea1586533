"""What samplers draw, beside the law that they draw by."""

from collections import Counter


def starts_drawn(rb, slice_len):
    """How often each stored step was the first of 20,000 clips, by its place."""
    counts = Counter()
    for _ in range(40):
        index, _ = rb.sampler.sample(rb.storage, 500 * slice_len)
        starts = rb.storage.get(index)["next", "truncated"].squeeze(-1).roll(1)
        counts.update(rb.storage.places(index)[starts].tolist())
    assert counts.total() == 20000
    return counts


def chi_square(drawn, law):
    """How far draws are from a law: the weight of everything that may be drawn."""
    counts = Counter(drawn)
    assert counts.keys() <= law.keys()
    scale = counts.total() / sum(law.values())
    return sum(
        (counts[key] - scale * weight) ** 2 / (scale * weight) for key, weight in law.items()
    )
