"""Private names of torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

# ---- tensors that may be changed in place -------------------------------------------------------


def times_changed(tensor: Tensor) -> int:
    """How often torch saw a tensor change in place; 0 in inference mode, where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


# ---- models that score rows -----------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` wraps a module or compiles its calls: then hooks may be passed by."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def is_changed(module: nn.Module) -> bool:
    """Whether hooks, or another ``forward``, make a module's calls more than its class says."""
    hooks = bool(module._forward_hooks) or bool(module._forward_pre_hooks)
    return hooks or "forward" in vars(module)


class ExactBuffers(nn.Module):
    """A module whose buffers move between devices but keep their type: ``half()`` leaves them exact.

    All of ``to``, ``half``, ``cuda`` and so on go through ``_apply``, which casts floating buffers.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactBuffers:
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
