"""The routing policies: pure, one module per kind. ``proxy.routing`` names them."""
