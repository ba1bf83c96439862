"""Our face on D-Bus: the service inside the daemon, and the typed client that vllmctl uses."""
