"""Prompts of a wanted length that no prefix cache has seen. Pure: the same seed gives the same text."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Ordinary words, most of them one token of any tokenizer.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name team minute idea body back parent face level office door health person art war history
party result change morning reason research girl guy moment air teacher force education
"""
_WORDS = tuple(_TEXT.split())
#: Tokens of one of them until an engine has said it.
FIRST_GUESS = 1.1


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes texts of about so many tokens. ``tokens_per_word``: as the model's tokenizer counts."""

    tokens_per_word: float = FIRST_GUESS

    def text(self, name: str, tokens: int) -> str:
        """About ``tokens`` tokens; texts of different names share no beginning."""
        own = random.Random(name)
        count = max(1, round(tokens / self.tokens_per_word))
        return f"[{name}] " + " ".join(own.choices(_WORDS, k=count))
