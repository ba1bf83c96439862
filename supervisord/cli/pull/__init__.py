"""``vllmctl pull``."""
