"""The clients' side of the port: who may connect, one protocol per connection, requests as they come, TLS."""
