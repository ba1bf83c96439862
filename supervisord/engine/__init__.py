"""What the supervisor asks of an engine and of the processes that it is made of. I/O only; no decision is made here."""
