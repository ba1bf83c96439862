"""/v1/models from what the supervisor knows: every model is listed, asleep or not, and listing wakes nobody."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.errors import ProxyError
from supervisord.core.admission import ListedModel


def model_list(models: Sequence[ListedModel]) -> dict[str, object]:
    """OpenAI's list object; an alias is an entry of its own whose ``root`` is the model, an adapter's has a parent."""
    names = ((model, name) for model in models for name in (model.name, *model.aliases, *model.adapters))
    return {"object": "list", "data": [_entry(model, name) for model, name in names]}


def model_entry(models: Sequence[ListedModel], name: str) -> dict[str, object]:
    """One model's object by name or alias; raises ``ProxyError`` 404."""
    for model in models:
        if name == model.name or name in model.aliases or name in model.adapters:
            return _entry(model, name)
    raise ProxyError(404, "model_not_found", f"The model `{name[:200]}` does not exist.", param="model")


def only_model(models: Sequence[ListedModel]) -> str | None:
    """The model of a request that names none: the only one there is, else None."""
    return models[0].name if len(models) == 1 else None


def model_with_adapter(models: Sequence[ListedModel], name: str) -> str | None:
    """The model whose engines serve the adapter ``name``."""
    return next((model.name for model in models if name in model.adapters), None)


def _entry(model: ListedModel, name: str) -> dict[str, object]:
    adapter = name in model.adapters
    # The first six are vLLM's; the rest is what a client may want to know before it asks a sleeping model.
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "vllm",
        "root": name if adapter else model.name,
        "parent": model.name if adapter else None,
        "max_model_len": model.max_model_len,
        "state": model.state,
        "routing": model.routing,
        "wake_seconds": None if model.wake_seconds is None else round(model.wake_seconds, 3),
        "simulated": model.simulated,
    }
