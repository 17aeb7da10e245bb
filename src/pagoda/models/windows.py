"""Which layers attend to a window of the latest positions, as the keys of model files say it."""

from __future__ import annotations

from pagoda.errors import ModelFileError, UnsupportedError
from pagoda.models.config import ModelConfig
from pagoda.weights.settings import CONVERT_AGAIN, Settings

Windows = tuple[int | None, ...]


def window_size(settings: Settings, key: str, max_position: int) -> int | None:
    """Span of attention; a window that no sequence can outgrow is full attention."""
    window = settings.integer(key)
    if window is None or window == 0 or window >= max_position:
        return None
    if window < 0:
        raise ModelFileError(
            f"{settings.label(key)} must not be negative, it is {window}", hint=CONVERT_AGAIN
        )
    return window


def all_layers(settings: Settings, key: str, config: ModelConfig) -> Windows:
    """The same window everywhere."""
    return (window_size(settings, key, config.max_position),) * config.num_layers


def all_but_every(period: int, window: int | None, num_layers: int) -> Windows:
    """Layers `period - 1`, `2 period - 1`, ... attend to everything, the others to `window`."""
    return tuple(None if (i + 1) % period == 0 else window for i in range(num_layers))


def by_layer_types(settings: Settings, window: int | None, num_layers: int) -> Windows | None:
    """What `layer_types` of a config.json says; None where it says nothing."""
    types = settings.texts("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise ModelFileError(
            f"{settings.label('layer_types')} has {len(types)} entries for {num_layers} layers"
        )
    kinds = {"sliding_attention": window, "full_attention": None}
    for kind in types:
        if kind not in kinds:
            raise UnsupportedError(
                f"layers of type {kind!r:.80} are not supported", hint=f"only {', '.join(kinds)} are"
            )
    return tuple(kinds[kind] for kind in types)


def after_first_layers(settings: Settings, config: ModelConfig) -> Windows:
    """Qwen's config.json: `use_sliding_window` has to be on, and the first `max_window_layers` stay full."""
    window = window_size(settings, "sliding_window", config.max_position)
    if not settings.flag("use_sliding_window"):
        window = None
    listed = by_layer_types(settings, window, config.num_layers)
    if listed is not None:
        return listed
    num_full = settings.integer("max_window_layers")
    num_full = config.num_layers if num_full is None else num_full
    return tuple(window if i >= num_full else None for i in range(config.num_layers))
