"""systemd as the supervisor sees it: commands, signals, logs, sd_notify and the sockets that it hands over."""
