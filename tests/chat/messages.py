"""Messages of a dialogue, and the tokens that transformers alone writes of one."""

from __future__ import annotations


def _of(role):
    return lambda content, **fields: {"role": role, "content": content, **fields}


user, said, system, tool = map(_of, ("user", "assistant", "system", "tool"))


def render(tokenizer, messages, **kwargs):
    """Tokens of a whole dialogue at once, with what begins an answer."""
    kwargs |= {"add_generation_prompt": True, "return_dict": False}
    return tokenizer.apply_chat_template(messages, **kwargs)
