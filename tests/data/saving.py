"""Ways to save a buffer or a storage, and to load it again."""

import copy
import pickle

HOW = ["dumps", "state_dict", "pickle", "deepcopy"]


def saved(held, how, path, other, **kwargs):
    """One that holds what ``held`` does; ``other`` is there to be loaded, with these arguments."""
    if how == "dumps":
        held.dumps(path)
        other.loads(path, **kwargs)
        return other
    if how == "state_dict":
        other.load_state_dict(held.state_dict())
        return other
    return pickle.loads(pickle.dumps(held)) if how == "pickle" else copy.deepcopy(held)
