"""``vllm-replica NAME``: becomes the engine of one bundled replica, and says READY=1 when the model answers.

Light on purpose: nothing here imports more than the standard library and the configuration.
"""
