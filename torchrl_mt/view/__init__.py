"""See what happens: pages of episodes, the log of a run, its curves, and what is wrong with it."""

from torchrl_mt.view.health import Finding, check_run
from torchrl_mt.view.plot_run import plot_run
from torchrl_mt.view.report import Report, write_report
from torchrl_mt.view.run_log import RunLog

__all__ = ["Finding", "Report", "RunLog", "check_run", "plot_run", "write_report"]
