"""Which episodes run, and when: groups, failures, staleness."""
