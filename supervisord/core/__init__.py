"""The decisions: pure functions of (state, event, now). No I/O, no clock, no third-party import."""
