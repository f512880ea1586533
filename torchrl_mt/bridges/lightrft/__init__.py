"""Experience in the form of LightRFT."""

from torchrl_mt.bridges.lightrft.experience import Experience
from torchrl_mt.bridges.lightrft.experience_list import make_experience_list

__all__ = ["Experience", "make_experience_list"]
