"""The engines' side: pools of kept connections, and one conversation at a time on each."""
