"""Choose the layers of a model: found or matched, then every n-th."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from lightning_ckpt.selection.detect import find_layers, repeated_classes
from lightning_ckpt.selection.match import LayerPattern, SelectionError, match_layers, nearest
from lightning_ckpt.selection.modules import class_names, has_forward, named_candidates, outermost, unwrap
from lightning_ckpt.selection.summary import Selection


def check_every_n_layers(every_n_layers: Any) -> None:
    """Raise unless `every_n_layers` is an integer of at least 1.

    Raises:
        SelectionError: it is not.
    """
    if isinstance(every_n_layers, bool) or not isinstance(every_n_layers, int) or every_n_layers < 1:
        raise SelectionError(
            f"`every_n_layers={every_n_layers!r}` must be an integer of at least 1: "
            "1 takes every layer, 2 every other one, and so on."
        )


def select_layers(
    model: nn.Module,
    layers: list[LayerPattern] | LayerPattern | None = None,
    *,
    check_fn: Callable[[nn.Module], bool] | None = None,
    every_n_layers: int = 1,
) -> Selection:
    r"""Choose layers of any PyTorch model: the first and every n-th after it, in the order of `model.modules()`.

    The count is that of Hugging Face's `activation_checkpointing_enable(every_n_layers=n)`: it runs across the whole
    model, so `every_n_layers=2` of 6 layers takes the 1st, 3rd and 5th. A module that sits in several places is one
    layer. The model itself, `torchmetrics` metrics and layers inside another chosen layer are never taken.

    Args:
        model: the model to look into. Modules compiled with `torch.compile` are looked through.
        layers: what a layer is: a module class, a class name (`"GPTNeoXLayer"`), an import path
            (`"torch.nn.TransformerEncoderLayer"`), a qualified name, a glob on qualified names (`"model.layers.*"`), a
            regular expression that matches the whole qualified name (`r"h\.[0-9]+"`), or a list of these.
            Default: found by looking for Hugging Face layers, else for repeated blocks.
        check_fn: a predicate `module -> bool` instead of `layers`, as for PyTorch's
            `apply_activation_checkpointing`.
        every_n_layers: take the first layer and every n-th after it. Default: 1, every layer.

    Returns:
        The chosen layers and what they were counted over.

    Raises:
        SelectionError: a `ValueError`: nothing was found, a pattern matches nothing, a match has no forward of its own,
            `every_n_layers` is below 1 or no integer, or both `layers` and `check_fn` are given.
        TypeError: `layers` holds something that is no pattern, or `check_fn` is not callable.

    Example::

        from lightning_ckpt.selection import select_layers

        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4), num_layers=6)
        print(select_layers(model, every_n_layers=2))
        # 3 of 6 TransformerEncoderLayer: layers.{0, 2, 4}, 1.07 MiB of parameters each
    """
    check_every_n_layers(every_n_layers)
    if layers is not None and check_fn is not None:
        raise SelectionError("Give either `layers` or `check_fn`, not both.")
    if check_fn is not None:
        matched = _match_predicate(model, check_fn)
    elif layers is not None:
        patterns = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
        matched = _match_patterns(model, patterns)
    else:
        matched = find_layers(model)
        if not matched:
            raise SelectionError(f"No repeated layers were found in {_class_of(model)}. {_what_to_write(model)}")
    chosen = [item for index, item in enumerate(matched.items()) if index % every_n_layers == 0]
    return Selection(outermost(chosen), matched)


def _match_predicate(model: nn.Module, check_fn: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    if not callable(check_fn):
        raise TypeError(f"`check_fn={check_fn!r}` must be a function that takes a module and returns True or False.")
    matched = {name: module for name, module in named_candidates(model) if check_fn(module)}
    if not matched:
        raise SelectionError(
            f"`check_fn={getattr(check_fn, '__name__', check_fn)}` is true for no module of {_class_of(model)}. "
            f"{_what_to_write(model)}"
        )
    return outermost(_with_forward(matched))


def _match_patterns(model: nn.Module, patterns: list[LayerPattern]) -> dict[str, nn.Module]:
    if not patterns:
        raise SelectionError(f"`layers=[]` names no layer. {_what_to_write(model)}")
    candidates = dict(named_candidates(model))
    found: set[str] = set()
    for pattern in patterns:
        matched = match_layers(candidates, pattern)
        if not matched:
            raise SelectionError(_no_match(model, candidates, pattern))
        found |= {name for name, _ in _with_forward(matched)}
    return outermost((name, module) for name, module in candidates.items() if name in found)


def _with_forward(matched: dict[str, nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    """Leave out the `ModuleList`s that a wide pattern also matches; one that matches nothing else is an error."""
    callable_ones = [(name, module) for name, module in matched.items() if has_forward(module)]
    if not callable_ones:
        name, module = next(iter(matched.items()))
        raise SelectionError(
            f"{name!r} is a {type(module).__name__}, which is never called itself. "
            f"Name what it holds: `layers={name + '.*'!r}`."
        )
    return callable_ones


def _no_match(model: nn.Module, candidates: dict[str, nn.Module], pattern: LayerPattern) -> str:
    written = pattern if isinstance(pattern, str) else pattern.__name__
    message = f"`layers={written!r}` matches no module of {_class_of(model)}."
    itself = unwrap(model)
    if pattern in class_names(type(itself)) or (isinstance(pattern, type) and isinstance(itself, pattern)):
        return f"{message} That is the model itself; name the layers inside it. {_what_to_write(model)}"
    close = nearest(candidates, pattern)
    if close:
        return f"{message} Did you mean {' or '.join(map(repr, close))}?"
    return f"{message} {_what_to_write(model)}"


def _what_to_write(model: nn.Module) -> str:
    counts = {cls.__name__: len(group) for cls, group in repeated_classes(model).items()}
    if counts:
        known = "Its repeated classes are"
    else:
        known = "It has"
        parents = (module for _, module in named_candidates(model) if next(module.children(), None) is not None)
        counts = Counter(type(module).__name__ for module in parents if has_forward(module))
    if not counts:
        return "It has no module with parts of its own, so there is nothing to recompute."
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items(), key=lambda item: -item[1])[:6])
    return f"{known} {listed}; write, for example, `layers={next(iter(counts))!r}`."


def _class_of(model: nn.Module) -> str:
    return type(unwrap(model)).__name__
