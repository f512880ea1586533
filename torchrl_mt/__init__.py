"""Multi-turn reinforcement learning in TorchRL.

The parts live in subpackages that mirror TorchRL's and are imported by name:
``torchrl_mt.data``, ``.transforms``, ``.engines``, ``.envs``, ``.collectors`` and ``.objectives``.
"""

__version__ = "0.1.0"
