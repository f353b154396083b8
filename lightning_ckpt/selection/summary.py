"""What was selected, and how it prints."""

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

_SHOWN = 4  # indices or names shown before the rest is left out


@dataclass(frozen=True)
class Selection:
    """Layers chosen for treatment.

    Attributes:
        layers: the chosen layers by qualified name, in the order of `model.modules()`.
        matched: everything the choice was counted over, by qualified name: all layers found or matched.

    Example::

        selection = select_layers(model, every_n_layers=2)
        print(selection)            # one line per kind of layer
        print(selection.table())    # one line per layer
    """

    layers: dict[str, nn.Module]
    matched: dict[str, nn.Module]

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        """One line per class and place: ``6 of 12 GPTNeoXLayer: gpt_neox.layers.{0, 2, 4, ..., 10}, 3.0 MiB each``."""
        return "\n".join(self._describe(cls) for cls in dict.fromkeys(map(type, self.layers.values())))

    def table(self) -> str:
        """One line per chosen layer: qualified name, class, MiB of parameters."""
        width = max(map(len, self.layers), default=0)
        return "\n".join(
            f"{name:<{width}}  {type(layer).__name__}  {_mib(layer)}" for name, layer in self.layers.items()
        )

    def _describe(self, cls: type) -> str:
        chosen = [name for name, layer in self.layers.items() if type(layer) is cls]
        total = sum(type(layer) is cls for layer in self.matched.values())
        sizes = list(dict.fromkeys(_mib(self.layers[name]) for name in chosen))
        size = f"{sizes[0]} of parameters each" if len(sizes) == 1 else "of different sizes"
        return f"{len(chosen)} of {total} {cls.__name__}: {shorten_names(chosen)}, {size}"


def _mib(layer: nn.Module) -> str:
    try:
        # DeepSpeed's ZeRO-3 leaves empty parameters behind, which know their full size.
        size = sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in layer.parameters())
    except (RuntimeError, ValueError):  # lazy modules have no shapes yet
        return "unknown size"
    return f"{size / 2**20:.3g} MiB"


def shorten_names(names: list[str]) -> str:
    """``['h.0', 'h.2', 'h.4']`` as ``h.{0, 2, 4}``; long lists keep their ends."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        index = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
        if index is None:
            places[name, ""].append("")
        else:
            places[".".join([*parts[:index], ""]), ".".join(["", *parts[index + 1 :]])].append(parts[index])
    shown = [
        before + (_shorten(indices, braces=True) if len(indices) > 1 else indices[0]) + after.rstrip(".")
        for (before, after), indices in places.items()
    ]
    return _shorten(shown)


def _shorten(items: list[str], braces: bool = False) -> str:
    if len(items) > _SHOWN + 1:
        items = [*items[: _SHOWN - 1], "...", items[-1]]
    text = ", ".join(items)
    return f"{{{text}}}" if braces else text
