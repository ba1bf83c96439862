"""How a fingerprint is asked for: a request that any vLLM answers the same way as long as its weights are the same.

A model that generates tells how likely it finds each token of a fixed text, and adds a few of its own. The given
ones tell the most: nothing can flip there, and even two models that know nothing, and choose among words that are all
equally unlikely to them, find other words a little less so. A pooling model makes a vector of the text.

vLLM has only the routes of what its model can do; a route that is not there is a 404 (older ones said 400 or 501).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any

from supervisord.core.canary import Fingerprint

log = logging.getLogger(__name__)

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
#: Route and whether it is to tell of the prompt too, in the order in which they are tried. Some engines cannot tell of
#: the prompt (a prefill that is cut short, for instance) and answer 400.
ATTEMPTS = ((COMPLETIONS, True), (COMPLETIONS, False), (EMBEDDINGS, False))
#: Every layer computes on a prompt of any length; this one has words enough that wrong weights cannot be lucky.
PROMPT = "The lighthouse keeper counted seven ships, then wrote their names and"
#: One token comes from the prefill alone; the others are decoded from the cache that it filled.
TOKENS = 4
#: So much of a vector is kept; garbage does not agree with it in 64 places.
DIMENSIONS = 64
#: vLLM's own floor for a log probability that is no finite number.
_FLOOR = -9999.0


class Unanswered(Exception):
    """The engine said 200 and did not answer the prompt; the text says what it did."""


def request(route: str, model: str | None, *, echo: bool) -> dict[str, object]:
    """The body for ``route``. ``model`` None: the engine answers with the one that it has.

    No two have the same ``cache_salt``: what is compared was computed now, not remembered from before a wake, and no
    other prompt ever meets it in the prefix cache.
    """
    body: dict[str, object] = {"model": model} if model else {}
    body["cache_salt"] = secrets.token_hex(8)
    if route == EMBEDDINGS:
        return body | {"input": PROMPT, "encoding_format": "float"}
    # ignore_eos: always as many tokens. logprobs 0: those of the tokens themselves, which no --max-logprobs forbids.
    return body | {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "seed": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "echo": echo,
    }


def read(route: str, answer: object) -> Fingerprint | None:
    """The fingerprint in the JSON that ``route`` answered; None when it is in none of the shapes known here.

    Raises ``Unanswered`` when the request was cut short.
    """
    try:
        return _vector(answer) if route == EMBEDDINGS else _tokens(answer)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        log.debug("an answer of %s has no fingerprint in it: %r", route, error)
        return None


def _tokens(answer: Any) -> Fingerprint:
    choice = answer["choices"][0]
    # A sleep with mode=abort, or a stop, ends what runs with HTTP 200.
    if choice.get("finish_reason") == "abort":
        raise Unanswered("it was aborted")
    tokens, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
    if values and values[0] is None:
        tokens, values = tokens[1:], values[1:]  # before the first token of a prompt there was nothing to tell it from
    if not tokens:
        raise Unanswered("not one token")
    if len(tokens) != len(values):
        raise ValueError(f"{len(tokens)} tokens and {len(values)} log probabilities")
    return Fingerprint(tuple(str(token) for token in tokens), tuple(_finite(value, _FLOOR) for value in values))


def _vector(answer: Any) -> Fingerprint:
    vector = [_finite(value, 0.0) for value in answer["data"][0]["embedding"]]
    if not vector:
        raise Unanswered("an empty vector")
    kept = min(len(vector), DIMENSIONS)
    return Fingerprint((), tuple(vector[place * len(vector) // kept] for place in range(kept)))


def _finite(value: Any, otherwise: float) -> float:
    # NaN is equal to nothing and greater than nothing, so no comparison would ever find it wrong.
    number = float(value)
    return number if math.isfinite(number) else otherwise


def progress_of(metrics: str) -> int | None:
    """Tokens processed and generated so far, of all engine cores, from a page of Prometheus metrics; None: not told."""
    wanted: Mapping[str, list[float]] = {"vllm:prompt_tokens_total": [], "vllm:generation_tokens_total": []}
    for line in metrics.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in wanted:
            try:
                wanted[name].append(float(line.rsplit(" ", 1)[-1]))
            except ValueError:
                return None
    total = sum(sum(values) for values in wanted.values())
    return int(total) if all(wanted.values()) and math.isfinite(total) else None
