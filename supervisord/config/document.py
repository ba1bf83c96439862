"""The reference of every key as Markdown: ``python -m supervisord.config.document > docs/configuration.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from supervisord.config.keys import MODEL, PROXY, REPLICA, SERVE, SUPERVISOR, TAKEN_OPTIONS
from supervisord.config.kinds import (
    CommandLine,
    Duration,
    EngineOption,
    Environment,
    Flag,
    Key,
    Kind,
    ListOf,
    Named,
    Size,
    Table,
    Text,
    Whole,
)
from supervisord.config.quantities import spell_duration, spell_size
from supervisord.config.show import toml_value

_HEAD = """\
# Configuration

<!-- Made by `python -m supervisord.config.document > docs/configuration.md`; do not edit. -->

TOML, in `$XDG_CONFIG_HOME/vllm-supervisord/config.toml` (usually `~/.config/vllm-supervisord/config.toml`), in
system mode in `/etc/vllm-supervisord/config.toml`. Then every `config.d/*.toml` beside it, in the order of their
names: later files win, tables merge, lists and values are replaced. `--config FILE` names another main file; its
`config.d` is the one beside it.

`vllmctl config check` tells every mistake at once, with file, table, key and reason, also those of the files that it
points to (keys, certificates). `vllmctl config show` prints the merged result with all defaults. `vllmctl reload` (or
SIGHUP) takes a changed configuration over and touches only what changed; a wrong one changes nothing.

Editors: `packaging/config.schema.json` is a JSON schema. It knows everything but the rules between keys, which are
said below.

## Durations and sizes

Durations are spelled as systemd does: `"10min"`, `"1h 30min"`, `"500ms"`, `"2 weeks"`; a number is seconds, so
`90` is `"1min 30s"`. Units: `us`, `ms`, `s`, `min` (or `m`), `h`, `d`, `w`, `M` (month), `y`, and systemd's longer
names. In a sum every number needs its unit: systemd reads `1h 30` as an hour and 30 *seconds*, so it is refused
here. `"infinity"` is allowed only where the table says so.

Sizes: `"32G"`, `"1.5G"`, `"512M"`, with base 1024 and the suffixes `K M G T P E`; a number is bytes.
"""

_RULES = """\
## Rules between keys

- Names: no model name or alias may be there twice; no replica name, unit or endpoint either.
- A replica with `unit` needs `endpoint`. One without `unit` is bundled and needs the model's `serve`; an
  `endpoint` of its own must be a Unix socket or a loopback address (a loopback port can be reached by every user
  of the machine, its sleep and wake routes too; the default socket cannot).
- A model without `replicas` but with `serve` has one bundled replica under its own name. Where that is no name for
  a replica (`org/name`), give it a `replicas` table.
- `serve` with no bundled replica is a mistake, as it would be used by nobody.
- `sleep1` < `sleep2` < `stop`, each where it is set.
- `backoff_min` must not be longer than `backoff_max`, `listen` must not be the endpoint of a replica.
- `tls_certificate` and `tls_key` go together.
- `allow_clients` must not be empty. A network in it, or in `trusted_proxies`, must have no address of its own
  (`192.168.1.0/24`, not `192.168.1.7/24`).
- `cors_origins` is either `["*"]` or a list of origins.
"""

_LAUNCH = """\
## What the launcher adds

`vllm-replica NAME` is what `vllm@NAME.service` runs; `vllm-replica --print NAME` prints the command line and the
environment and runs nothing.

- `--served-model-name` with the model's name and its aliases, `--uds` or `--host` and `--port`.
- `--enable-sleep-mode`, when the idle ladder of the model has `sleep1` or `sleep2` and `enable-sleep-mode` is not
  set. On a CPU vLLM refuses it: set `enable-sleep-mode = false` there; sleep and wake work, but no memory is given
  back.
- `VLLM_SERVER_DEV_MODE=1`, without which vLLM has no sleep and wake routes.
- With `gpus`: `CUDA_VISIBLE_DEVICES` and the same in `HIP_VISIBLE_DEVICES` (vLLM on ROCm insists that they are
  equal where both are set), and `CUDA_DEVICE_ORDER=PCI_BUS_ID`, because CUDA's own order is by speed and not that
  of `nvidia-smi`. `ROCR_VISIBLE_DEVICES` is never set: it filters before the other two, which would then count
  within its result. Set any of these in `env` and yours alone hold.

Values that begin with `-` are passed as `--option=value`. Lists: `middleware` is repeated, `allowed-origins`,
`allowed-methods` and `allowed-headers` become one JSON list, as vLLM wants them. Options with one dash only
(`-O3`) go into `args`.
"""

_TIMEOUTS = """\
## Timeouts of callers

A request to a sleeping model is held until the model is awake, so **a caller's timeout must be longer than the
slowest wake**: about 60 seconds for a large model asleep at level 2, and minutes for one whose unit was stopped.
With a shorter one the caller gives up; the wake still goes on and a later request finds the model awake, but that
one request is lost.

- What a wake took last is measured: `vllmctl status`, `WakeUSec` on D-Bus, and `/v1/models`. Take twice that.
- Streaming callers see an SSE comment every `wait_comment_after` while they wait, which keeps idle timeouts from
  firing; timeouts on the whole request they must raise themselves. The OpenAI clients' default is 600 seconds,
  many HTTP libraries' is 5 to 60.
- A 503 carries `Retry-After` from measured times. Callers should obey it.
- Intermediaries (nginx's `proxy_read_timeout`, 60 s by default) must be raised in the same way.
"""


def document() -> str:
    """The whole page."""
    parts = [
        _HEAD,
        _section("[proxy]", PROXY),
        _section("[supervisor]", SUPERVISOR),
        _section("[models.NAME]", MODEL),
        *(_section(f"[models.NAME.{key.name}]", key.kind) for key in MODEL.keys if isinstance(key.kind, Table)),
        _taken(),
        _section("[models.NAME.replicas.R]", REPLICA),
        _RULES,
        _LAUNCH,
        _TIMEOUTS,
    ]
    return "\n".join(parts)


def _section(title: str, table: Table) -> str:
    rows = "\n".join(_rows(table, ""))
    return f"## `{title}`\n\n{table.doc}\n\n| key | value | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _rows(table: Table, prefix: str) -> Iterator[str]:
    for key in table.keys:
        if isinstance(key.kind, Table) and not _has_section(key.kind):
            yield from _rows(key.kind, f"{prefix}{key.name}.")
        else:
            default = "**required**" if key.required else key.shown or _default(key)
            meaning = key.doc if not isinstance(key.kind, Table | Named) else "See below."
            yield f"| `{prefix}{key.name}` | {_kind(key.kind)} | {default} | {meaning} |"


def _has_section(table: Table) -> bool:
    return any(key.kind is table for key in MODEL.keys)


def _taken() -> str:
    rows = "\n".join(f"- `{name}` {why}." for name, why in TAKEN_OPTIONS.items())
    assert dict(SERVE.taken).keys() >= TAKEN_OPTIONS.keys()
    return f"Not to be set here, nor in `args`:\n\n{rows}\n"


def _default(key: Key) -> str:
    if isinstance(key.kind, Table | Named):
        return ""
    if isinstance(key.kind, Duration):
        return f'`"{spell_duration(key.default)}"`'
    if isinstance(key.kind, Size):
        return f'`"{spell_size(key.default)}"`'
    if key.default in ((), {}):
        return "none"
    return f"`{toml_value(key.default)}`"


def _kind(kind: Kind) -> str:
    match kind:
        case Text():
            return " or ".join(f'`"{choice}"`' for choice in kind.choices) if kind.choices else "text"
        case Flag():
            return "`true` or `false`"
        case Whole():
            return "whole number" if kind.minimum == 0 else f"whole number from {kind.minimum}"
        case Duration():
            return 'duration or `"infinity"`' if kind.never else "duration"
        case Size():
            return "size"
        case ListOf():
            return "list of texts" if isinstance(kind.item, Text) else "list of whole numbers"
        case CommandLine():
            return "text or list of texts"
        case Environment():
            return "table of texts and numbers"
        case EngineOption():
            return "anything"
        case Table():
            return "table"
        case Named():
            return "tables by name"


if __name__ == "__main__":
    sys.stdout.write(document())
