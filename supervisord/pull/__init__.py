"""Fetching what a replica will need: what runs in a unit of its own, with the replica's environment (vllmctl pull)."""
