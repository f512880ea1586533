"""What this process knows of servers of computers."""

from __future__ import annotations

from torchrl_mt.bridges.cua_bench import leases


def taken():
    """Servers that have a holder."""
    return {url for url, load in leases._loads.items() if load.running}


def failing():
    """Servers that failed and have not worked since."""
    return {url for url, load in leases._loads.items() if load.away_until}
