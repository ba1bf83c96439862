"""The public port: what clients see. Knows the supervisor only through ``supervisord.core.admission``."""
