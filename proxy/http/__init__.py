"""HTTP/1.1 by the letter, the same for both sides: heads, framing, content codings, bodies on their way through."""
