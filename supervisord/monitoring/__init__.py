"""The status listener and the metrics on it. Nothing of this is imported where ``status_listen`` is not set."""
