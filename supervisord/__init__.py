"""vllm-supervisord: one endpoint for the vLLM replicas of one machine, supervised by systemd."""

__version__ = "0.1.0"
