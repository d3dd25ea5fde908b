"""YAML into dataclasses, strictly: every unknown key, duplicate key, wrong type and value out of bounds is reported.

Scalars are those of YAML 1.2, where PyYAML keeps 1.1: ``1e-4`` is a number, ``no`` and ``1:30`` are text.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from yaml import YAMLError

__all__ = ["Bounds", "Report", "YAMLError", "build", "dump", "key_paths", "load"]

Report = Callable[[str, str], None]
"""Takes the key's path, ``target.context_layers[2]``, and what is wrong there."""

_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]{1,400}", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
_NOUNS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
_REFUSED = {"float16": "the hidden-state outliers of large targets overflow its range of 65504"}


class Bounds(NamedTuple):
    """Limits of a number, or of the length of a text or list."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def complaint(self, size: float) -> str | None:
        """What ``size`` must be and is not."""
        if size < self.least:
            return f"at least {self.least}"
        if size <= self.above:
            return f"above {self.above}"
        return f"below {self.below}" if size >= self.below else None


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own class attribute, emptied


class _Dumper(yaml.SafeDumper):
    """Quotes what :class:`_Loader` would not read back as text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in _SCALARS.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)

# PyYAML reads 010 as octal 8.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def load(text: str) -> tuple[Any, list[str]]:
    """The content of one YAML document, and a sentence per duplicate key.

    Raises:
        YAMLError: the text is no YAML, or holds tags beyond plain data.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        problems: list[str] = []
        _find_duplicates(node, "", problems)
        return (None if node is None else loader.construct_document(node)), problems
    finally:
        loader.dispose()


def dump(content: Any) -> str:
    """Block style, keys in their order, lists of scalars in one line."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def _find_duplicates(node: Any, prefix: str, problems: list[str]) -> None:
    """PyYAML lets the last of equal keys win, silently."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in seen:
                problems.append(f"{name} stands twice, in lines {seen[name]} and {line}; keep one")
            seen[name] = line
            _find_duplicates(value, name + ".", problems)


def key_paths(kind: Any) -> list[str]:
    """Dotted paths of all keys of a dataclass, sections included."""
    hints = get_type_hints(kind)
    inner = {f.name: key_paths(hints[f.name]) if is_dataclass(hints[f.name]) else [] for f in fields(kind)}
    return [path for name, below in inner.items() for path in (name, *(f"{name}.{key}" for key in below))]


def build(kind: Any, tree: dict[Any, Any], known: Sequence[str], report: Report, prefix: str = "") -> Any:
    """An instance of the dataclass ``kind``. What is wrong is reported, and a default, or None, stands in for it.

    Args:
        tree: what the YAML holds.
        known: all valid key paths, to suggest from.
    """
    hints = get_type_hints(kind, include_extras=True)
    for key in tree:
        if key not in hints:
            report(f"{prefix}{key}", f"is no key of the config{_suggestion(prefix, str(key), list(hints), known)}")
    values: dict[str, Any] = {}
    for f in fields(kind):
        key, hint = prefix + f.name, hints[f.name]
        if is_dataclass(hint):
            section = {} if tree.get(f.name) is None else tree[f.name]
            if not isinstance(section, dict):
                report(key, f"is {section!r}; it must hold keys ({', '.join(x.name for x in fields(hint))})")
                section = {}
            values[f.name] = build(hint, section, known, report, key + ".")
        elif f.name in tree:
            values[f.name] = _read(hint, tree[f.name], key, report)
        elif f.default is MISSING and f.default_factory is MISSING:
            report(key, "is missing; it has no default")
            values[f.name] = None
    return kind(**values)


def _suggestion(prefix: str, key: str, siblings: list[str], known: Sequence[str]) -> str:
    """A key of that very name in another section, else the nearest in the same section, else the nearest of all."""
    likely = [path for path in known if path.rpartition(".")[2] == key]
    likely += [prefix + name for name in difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)]
    likely += difflib.get_close_matches(prefix + key, known, n=1, cutoff=0.75)
    return f"; did you mean {likely[0]}?" if likely else f"; valid here: {', '.join(siblings)}"


def _read(hint: Any, value: Any, key: str, report: Report) -> Any:
    """``value`` as the type ``hint``; where it does not fit, that is reported and None returned."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        out = _read(args[0], value, key, report)
        size = len(out) if isinstance(out, (str, list)) else out
        if size is not None and (complaint := args[1].complaint(size)):
            report(key, f"is {value!r}; {'it' if size is out else 'its length'} must be {complaint}")
        return out
    if origin in (Union, types.UnionType):
        return _read_union(args, value, key, report)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            reason = f" ({_REFUSED[value]})" if isinstance(value, str) and value in _REFUSED else ""
            report(key, f"is {value!r}{reason}; use {' or '.join(args)}")
        return value
    if origin is list:
        if not isinstance(value, list):
            report(key, f"is {value!r}; it must be a list, as in [{value}]")
            return None
        return [_read(args[0], item, f"{key}[{i}]", report) for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            report(key, f"is {value!r}; it must hold named values, as in {{name: value}}")
        return value
    return _read_scalar(hint, value, key, report)


def _read_union(options: tuple[Any, ...], value: Any, key: str, report: Report) -> Any:
    """Either a type or null, or a word or a type."""
    if value is None and type(None) in options:
        return None
    words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    if value in words:
        return value
    others = [option for option in options if option is not type(None) and get_origin(option) is not Literal]
    if words and isinstance(value, str):
        report(key, f"is {value!r}; use {' or '.join(words)}, or a number")
        return None
    return _read(others[0], value, key, report)


def _read_scalar(kind: Any, value: Any, key: str, report: Report) -> Any:
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    # type(), not isinstance(): true is an int to Python, and no number of layers.
    if type(value) is kind and not (kind is float and not math.isfinite(value)):
        return value
    shown, advice = repr(value), ""
    if isinstance(value, str):
        shown = f"the text {value!r}"
        if kind in (int, float) and re.fullmatch(_SCALARS["float"][0], value):
            advice = "; remove the quotes"
    elif kind is str and value is not None:
        advice = "; put it in quotes"
    report(key, f"is {shown}; it must be {_NOUNS[kind]}{advice}")
    return None
