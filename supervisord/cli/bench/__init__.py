"""``vllmctl bench``: loads that a person can put on their own replicas, and what they show."""
