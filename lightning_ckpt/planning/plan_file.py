"""A plan as a file that people can read and edit."""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from lightning_ckpt.planning.plan import LayerPlan, Plan
from lightning_ckpt.planning.treatment import Treatment
from lightning_ckpt.selection.summary import shorten_names

_VERSION = 1
_ABOUT = f"""\
# What is done with every layer, in the order of forward. Treatments may be changed by hand:
# {", ".join(Treatment)}.
# The figures stay those of the plan as it was made.
"""
_SHOWN = 80  # characters of a line that an error quotes: name and treatment stand first

# The keys of a file are the names of the fields, units included.
_OF_PLAN = get_type_hints(Plan)
_OF_LAYER = {key: kind for key, kind in get_type_hints(LayerPlan).items() if key != "name"}


class PlanFileError(ValueError):
    """A file that is no plan, or none for this model; the message quotes it and says what to write."""


class _File:
    """The parts of a YAML file, read so that errors can quote the line; every value is a text until it is needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise self.error(f"the file cannot be read: {reason}. Give one that `save_plan` has written") from error
        self.root = self._compose()

    def error(self, problem: str, at: yaml.Node | yaml.Mark | None = None) -> PlanFileError:
        """What is wrong, with the line if that is known."""
        mark = at.start_mark if isinstance(at, yaml.Node) else at
        lines = self._text.splitlines() if mark is not None else []
        if mark is None or mark.line >= len(lines):
            return PlanFileError(f"{self._path}: {problem}.")
        line = lines[mark.line].strip()
        shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ..."
        return PlanFileError(f"{self._path}, line {mark.line + 1}, `{shown}`: {problem}.")

    def _compose(self) -> yaml.Node:
        try:
            root = yaml.compose(self._text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is no YAML"
            mark = getattr(error, "problem_mark", None)
            raise self.error(f"the file is no YAML: {reason}. Mend the line, or save the plan again", mark) from error
        if root is None:
            raise self.error("the file is empty; save the plan again")
        return root

    def check_version(self) -> None:
        """The file is of the version that is read here; others may have other keys."""
        top = self.entries(self.root)
        if "version" not in top:
            raise self.error(f"`version` is missing; write `version: {_VERSION}` if `save_plan` has written the rest")
        if top["version"].value != str(_VERSION):
            raise self.error(
                f"this version of the format is not known here; make a new plan, which is of version {_VERSION}, or "
                "use the lightning_ckpt that has written this one",
                top["version"],
            )

    def entries(self, node: yaml.Node, keys: Collection[str] | None = None) -> dict[str, yaml.Node]:
        """The nodes of a mapping, by key; all of these keys, and no others, if some are given."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error("this should be lines of `name: value`; write it as `save_plan` does", node)
        found: dict[str, yaml.Node] = {}
        written: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error("a name should be a text; write it as `save_plan` does", key)
            if key.value in found:
                raise self.error(f"`{key.value}` is here a second time; remove one of the two", key)
            written[key.value], found[key.value] = key, value
        if keys is not None:
            self._check_keys(written, keys, None if node is self.root else node)
        return found

    def _check_keys(self, written: Mapping[str, yaml.Node], keys: Collection[str], at: yaml.Node | None) -> None:
        missing = [key for key in keys if key not in written]
        for name, node in written.items():
            if name not in keys:
                near = _nearest(name, missing)
                raise self.error(f"`{name}` has no meaning; {f'write `{near}`' if near else 'remove it'}", node)
        if missing:
            raise self.error(f"there is no {', '.join(f'`{key}`' for key in missing)}; write it as it was saved", at)

    def value(self, key: str, node: yaml.Node, kind: Any) -> Any:
        """What a node says, of the kind that the field is annotated with."""
        if kind == tuple[str, ...]:
            if not isinstance(node, yaml.SequenceNode):
                raise self.error(f"`{key}` should be a list, such as `[aten.mm, aten.bmm]`", node)
            return tuple(self.value(key, item, str) for item in node.value)
        read, what = _READERS[kind]
        try:
            if isinstance(node, yaml.ScalarNode):
                return read(node.value)
        except (ValueError, KeyError):
            pass
        written = f", not {node.value!r}" if isinstance(node, yaml.ScalarNode) else ""
        near = _nearest(node.value, Treatment) if kind is Treatment and written else None
        instead = f"; write `{near}`" if near else ""
        raise self.error(f"`{key}` should be {what}{written}{instead}", node)


def save_plan(plan: Plan, path: str | Path, layer_classes: Mapping[str, str] | None = None) -> None:
    """Write a plan to a YAML file, a line for each layer.

    Args:
        plan: the plan.
        path: the file to write.
        layer_classes: the class of each layer, by qualified name, for those who read the file. Default: none is named.
    """
    head = {"version": _VERSION} | {
        key: kind(getattr(plan, key)) for key, kind in _OF_PLAN.items() if key not in ("operators", "layers")
    }
    layers = {
        layer.name: {
            "treatment": str(layer.treatment),
            "class": "unknown" if layer_classes is None else layer_classes[layer.name],
            **{key: kind(getattr(layer, key)) for key, kind in _OF_LAYER.items() if key != "treatment"},
        }
        for layer in plan.layers
    }
    # With the style None, what holds nothing but single values is on one line.
    parts = [
        yaml.safe_dump(head, sort_keys=False, width=math.inf),
        yaml.safe_dump({"operators": list(plan.operators)}, default_flow_style=None, width=100),
        yaml.safe_dump({"layers": layers}, default_flow_style=None, sort_keys=False, width=math.inf),
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join([_ABOUT, *parts]), encoding="utf-8")


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a file that `save_plan` has written, perhaps edited since.

    Figures are taken as they are, whatever treatment a layer was given since.

    Raises:
        PlanFileError: a `ValueError`: the file cannot be read, or is no plan; the message says where and why.

    Example::

        save_plan(plan, "plan.yaml", {name: type(layer).__name__ for name, layer in selection.layers.items()})
        assert load_plan("plan.yaml") == plan
    """
    file = _File(Path(path))
    file.check_version()
    top = file.entries(file.root, ["version", *_OF_PLAN])
    layers = file.entries(top["layers"])
    if not layers:
        raise file.error("there are no layers; save the plan again", top["layers"])
    values = {key: file.value(key, top[key], kind) for key, kind in _OF_PLAN.items() if key != "layers"}
    return Plan(layers=tuple(_layer(file, name, node) for name, node in layers.items()), **values)


def _layer(file: _File, name: str, node: yaml.Node) -> LayerPlan:
    if not isinstance(node, yaml.MappingNode):
        raise file.error(f"the figures are missing; write `{name}: {{treatment: keep, ...}}`, as it was saved", node)
    entries = file.entries(node, ["class", *_OF_LAYER])
    return LayerPlan(name, **{key: file.value(key, entries[key], kind) for key, kind in _OF_LAYER.items()})


def check_layers(plan: Plan, names: Iterable[str]) -> None:
    """Check that a plan is one for the layers of this model.

    Args:
        plan: the plan.
        names: qualified names of the model's layers.

    Raises:
        PlanFileError: a `ValueError`: it is not; the message names what differs.
    """
    planned, present = list(plan.assignment), list(dict.fromkeys(names))
    differences = []
    if missing := [name for name in planned if name not in present]:
        differences.append(f"the model has no {shorten_names(missing)}")
    if unplanned := [name for name in present if name not in planned]:
        differences.append(f"the plan has no {shorten_names(unplanned)}")
    if differences:
        raise PlanFileError(
            f"the plan is for other layers: {'; '.join(differences)}. Choose the layers that it was made for "
            "(`layers=`), or make a new plan."
        )


def _nearest(written: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(written.lower(), map(str, known), n=1)), None)


def _bytes(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError
    return value


_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (_bytes, "a whole number of bytes, 0 or more"),
    float: (_seconds, "a number of seconds, 0 or more"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    str: (str, "a text"),
    Treatment: (Treatment, f"one of {', '.join(Treatment)}"),
}
