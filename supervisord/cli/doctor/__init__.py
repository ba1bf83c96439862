"""``vllmctl doctor``: what stands between this machine and a supervisor that works, and how to mend it."""
