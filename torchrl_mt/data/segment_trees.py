"""TorchRL's segment trees, also where its compiled extension fails to import.

The extension is built against one release of torch. Against others a function may be missing that
the trees never call: then only what is called is looked up, and the rest of TorchRL is left as it
is, without the extension.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers import prioritized

__all__ = ["segment_trees"]

_NAMES = {torch.float32: "SegmentTreeFp32", torch.float64: "SegmentTreeFp64"}
_lock = threading.Lock()
_loaded: ModuleType | None = None


def segment_trees(dtype: torch.dtype) -> tuple[Any, Any]:
    """TorchRL's trees of sums and of minima.

    Args:
        dtype: of the leaves, ``torch.float32`` or ``torch.float64``.

    Returns:
        the classes ``SumSegmentTree`` and ``MinSegmentTree`` of that dtype.

    Raises:
        ValueError: if ``dtype`` is another one.
        RuntimeError: if TorchRL has no extension that works here.

    Examples:
        >>> sums, minima = segment_trees(torch.float32)
        >>> tree = sums(4)
        >>> tree[torch.tensor([0, 2])] = torch.tensor([1.0, 2.0])
        >>> tree.query(0, 4)
        3.0
    """
    if dtype not in _NAMES:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    name = _NAMES[dtype]
    module = prioritized if prioritized.SumSegmentTreeFp32 is not None else _extension()
    return getattr(module, "Sum" + name), getattr(module, "Min" + name)


def _extension() -> ModuleType:
    """TorchRL's extension, looking up its functions as they are called."""
    global _loaded
    with _lock:
        if _loaded is None:
            found = find_spec("torchrl._torchrl")
            if found is None or found.origin is None:
                raise RuntimeError(
                    "priorities need TorchRL's compiled extension, which this build of TorchRL "
                    "lacks: install torchrl from a wheel (pip install torchrl)"
                )
            # Under a name of its own: TorchRL must not find functions whose call ends the process.
            name = f"{__name__}._torchrl"
            loader = ExtensionFileLoader(name, found.origin)
            spec = spec_from_file_location(name, found.origin, loader=loader)
            assert spec is not None
            flags = sys.getdlopenflags()
            sys.setdlopenflags(os.RTLD_LAZY)
            try:
                module = module_from_spec(spec)
                loader.exec_module(module)
            except ImportError as error:
                raise RuntimeError(
                    f"priorities need TorchRL's compiled extension, which does not load with torch "
                    f"{torch.__version__}: install the releases of torch and torchrl that belong "
                    f"together ({error})"
                ) from error
            finally:
                sys.setdlopenflags(flags)
            _loaded = module
        return _loaded
