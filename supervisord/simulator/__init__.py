"""A vLLM look-alike for machines without a GPU. Everything it says of itself says "simulated".

Reading order: ``main`` (the command line), ``options``, ``server`` (listener, start, stop), ``app`` (routes), ``api``
(what the dialects share), the dialects ``openai``, ``anthropic``, ``responses``, ``pooling``, ``audio``, ``realtime``,
``dev``, and ``control`` for tests; ``engine`` (the core: one loop), ``generation`` (one request in it), and below it
the pure parts: ``scheduler``, ``sleep``, ``cache``, ``faults``, ``tokens``.
"""
