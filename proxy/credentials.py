"""What the port knows that its configuration only points to."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.clients.keys import ApiKeys


@dataclass(frozen=True, slots=True)
class Credentials:
    """Replaced as a whole; requests that were let in are not asked again."""

    #: What clients must show; None: nothing.
    keys: ApiKeys | None = None
    #: By replica: the key that its engine asks for, given to it on behalf of clients that showed one of ours.
    engine_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: What new connections speak TLS with; None: plain HTTP.
    tls: ssl.SSLContext | None = None
