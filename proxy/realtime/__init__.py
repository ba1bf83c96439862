"""WebSocket sessions (``/v1/realtime``): from the handshake to the close of both ends."""
