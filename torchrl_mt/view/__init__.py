"""See what happens: pages of episodes."""

from torchrl_mt.view.report import Report, write_report

__all__ = ["Report", "write_report"]
