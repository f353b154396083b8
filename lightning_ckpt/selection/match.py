"""Match layers by what a user writes: a class, a class name, an import path, a module name, a pattern."""

import difflib
import fnmatch
import re
import sys

from torch import nn

from lightning_ckpt.selection.modules import class_names, has_forward


class SelectionError(ValueError):
    """What was asked for cannot be selected; the message says what could be written instead."""


LayerPattern = type[nn.Module] | str

# Module names hold letters, digits, underscores and dots, so these characters tell the kinds of pattern apart.
_REGEX_CHARACTERS = set("\\^$(){}|+")
_GLOB_CHARACTERS = set("*?[]")


def match_layers(candidates: dict[str, nn.Module], pattern: LayerPattern) -> dict[str, nn.Module]:
    r"""The candidates that `pattern` matches.

    A class matches its instances. A string with any of ``\ ^ $ ( ) { } | +`` is a regular expression and one with
    any of ``* ? [ ]`` a glob; both must match the whole qualified name (a glob's `*` crosses dots). Any other string
    is a class name, the import path of a class or a qualified name.

    Raises:
        SelectionError: `pattern` is not a valid regular expression.
        TypeError: `pattern` is neither a string nor a module class.
    """
    if isinstance(pattern, type) and issubclass(pattern, nn.Module):
        return {name: module for name, module in candidates.items() if isinstance(module, pattern)}
    if not isinstance(pattern, str):
        raise TypeError(
            f"`layers` takes class names, module names, patterns or module classes, not {pattern!r}. "
            "Give a predicate as `check_fn=`."
        )
    if _REGEX_CHARACTERS & set(pattern):
        return _match_names(candidates, pattern, pattern)
    if _GLOB_CHARACTERS & set(pattern):
        return _match_names(candidates, fnmatch.translate(pattern), pattern)
    found = {
        name: module for name, module in candidates.items() if pattern == name or pattern in class_names(type(module))
    }
    if not found and (cls := _known_class(pattern)):
        found = {name: module for name, module in candidates.items() if isinstance(module, cls)}
    return found


def _match_names(candidates: dict[str, nn.Module], regex: str, written: str) -> dict[str, nn.Module]:
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise SelectionError(f"`layers={written!r}` is not a valid regular expression: {error}.") from error
    return {name: module for name, module in candidates.items() if compiled.fullmatch(name)}


def _known_class(path: str) -> type[nn.Module] | None:
    """The module class at an import path such as `torch.nn.TransformerEncoderLayer`, which may be an alias.

    The class of a module in the model is imported already, so nothing is imported here: a qualified name that matches
    nothing must not run somebody's `model.py`.
    """
    module_path, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module_path), name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def nearest(candidates: dict[str, nn.Module], pattern: LayerPattern, count: int = 3) -> list[str]:
    """Class and module names of the model that look like what the user wrote."""
    written = pattern if isinstance(pattern, str) else pattern.__name__
    options: dict[str, str] = {}
    for name, module in candidates.items():
        if has_forward(module):
            for option in (_without_indices(name), type(module).__name__):
                options.setdefault(option.lower(), option)
    for text in (_without_indices(written), written.rpartition(".")[2]):
        close = difflib.get_close_matches(text.lower(), options, n=count, cutoff=0.5)
        if close:
            return [options[match] for match in close]
    return []


def _without_indices(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
