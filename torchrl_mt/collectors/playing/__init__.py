"""How one episode is played: by an environment or a workflow, in this process or another."""
