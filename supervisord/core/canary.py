"""A fingerprint of an engine's weights: what it answers to one fixed prompt, greedily.

An engine woken without its weights answers 200 and garbage, and nothing in its status tells. The same prompt at
temperature 0 gives the same few tokens with nearly the same log probabilities on the same weights; across wakes only
the kernels' own noise differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Log probabilities of one engine may differ by so much between two runs. Batch size and kernel choice move bf16
#: results by some hundredths; other weights move them by whole units.
TOLERANCE = 0.25
#: A pooling model's vector is compared by its direction.
LEAST_COSINE = 0.99


class FingerprintError(ValueError):
    """A stored fingerprint is not one of ours; the text names the key."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Generated tokens with their log probabilities, or (no tokens) a pooling model's vector."""

    tokens: tuple[str, ...]
    values: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        return {"tokens": list(self.tokens), "values": list(self.values)}

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Strict; raises ``FingerprintError``."""
        if not isinstance(value, Mapping):
            raise FingerprintError("not a JSON object")
        tokens, values = value.get("tokens"), value.get("values")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise FingerprintError("'tokens' is not a list of strings")
        if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
            raise FingerprintError("'values' is not a list of numbers")
        return cls(tuple(tokens), tuple(float(v) for v in values))


def difference(known: Fingerprint, seen: Fingerprint) -> str:
    """Why the two are not of the same weights, in words; empty when they are.

    A token may flip where two were nearly equally likely, and what follows then follows another text: the comparison
    ends at the first such tie.
    """
    if not known.tokens and not seen.tokens:
        cosine = _cosine(known.values, seen.values)
        return "" if cosine >= LEAST_COSINE else f"its vector points elsewhere (cosine {cosine:.3f})"
    if len(known.tokens) != len(seen.tokens) or len(known.values) != len(seen.values):
        return f"{len(seen.tokens)} tokens instead of {len(known.tokens)}"
    pairs = zip(known.tokens, seen.tokens, known.values, seen.values, strict=False)
    for place, (token, other, value, other_value) in enumerate(pairs):
        if abs(value - other_value) > TOLERANCE:
            return f"token {place} has log probability {other_value:.3f} instead of {value:.3f}"
        if token != other:
            # A likely token cannot have had a rival as likely as itself: exp(-0.6931) is one half.
            return f"token {place} is {other!r} instead of {token!r}" if value > -0.6 else ""
    return ""


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b) or not a:
        return 0.0
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norm = float((sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5)
    return dot / norm if norm else 0.0
