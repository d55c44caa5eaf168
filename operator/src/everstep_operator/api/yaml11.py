"""YAML as kubectl reads it, with the line of every value.

kubectl turns YAML into JSON first (sigs.k8s.io/yaml, resolve.go): there are no timestamps and no base-60 numbers, `y`
is true, `1e3` is a number, keys become strings, and a key written twice is an error. PyYAML's own loader differs in all
of these, so that a manifest could pass here and fail there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

_WORDS = {
    "bool": "y|Y|yes|Yes|YES|on|On|ON|true|True|TRUE|n|N|no|No|NO|off|Off|OFF|false|False|FALSE",
    "null": "~|null|Null|NULL|",
    "int": r"[-+]?(0x[0-9a-fA-F_]+|0o?[0-7_]+|0b[01_]+|[1-9][0-9_]*|0)",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    "merge": "<<",
}
_TRUE = re.compile("y|yes|on|true", re.IGNORECASE)


_TWO_HALVES = re.compile(r"(?<!\\)((?:\\\\)*)(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})")


class YamlError(ValueError):
    """The text is no YAML that kubectl would read; ``line`` counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class YamlDocument:
    """One document of a file."""

    number: int
    """From 1."""
    data: Any
    node: yaml.Node

    def line(self, path: Sequence[str | int]) -> int:
        """Return the line, from 1, of the value at ``path``, or of the nearest value around it that is written down."""
        node = self.node
        for step in path:
            below = _child_node(node, step)
            if below is None:
                break
            node = below
        return int(node.start_mark.line) + 1


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own protocol)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":null"):
                raise YamlError("a key must be a plain word", key.start_mark.line + 1)
            if key.value in seen:
                raise YamlError(f'key "{key.value}" already set in map', key.start_mark.line + 1)
            seen.add(key.value)
        self.flatten_mapping(node)
        pairs = [(self.construct_object(key, True), self.construct_object(value, deep)) for key, value in node.value]
        return {_key_text(key): value for key, value in pairs}

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> bool:
        return bool(_TRUE.fullmatch(node.value))

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int | float:  # type: ignore[override]
        text = node.value.replace("_", "")
        digits = text.lstrip("+-")
        # An older octal: 010 is eight.
        base = 8 if re.fullmatch("0[0-7]+", digits) else 0
        try:
            return int(text, base)
        except ValueError:  # more digits than Python takes for a number
            return float(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return float(node.value)


for _kind, _pattern in _WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), None)
for _kind in ("bool", "int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(_Loader, f"construct_yaml_{_kind}"))


def load_documents(text: str) -> Iterator[YamlDocument]:
    """Yield the documents that are not empty.

    Raises:
        YamlError: The text is not YAML that kubectl would read.
    """
    try:
        loader = _Loader(_respell_json(text))
    except yaml.YAMLError as error:  # a character that no text has
        raise YamlError(str(error), 1) from None
    try:
        number = 0
        while loader.check_node():
            number += 1
            node = loader.get_node()
            data = loader.construct_document(node)
            if node is not None and data is not None:
                if _contains_itself(data):
                    raise YamlError("an anchor's value contains itself", node.start_mark.line + 1)
                yield YamlDocument(number, data, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(str(error.problem or error), mark.line + 1 if mark else 1) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error), 1) from None
    except RecursionError:
        raise YamlError("nested too deeply", 1) from None
    finally:
        loader.dispose()


def _respell_json(text: str) -> str:
    """Return JSON as YAML 1.1 has it, with its lines; any other text as it is.

    JSON may be indented by tabs, and spells a character beyond U+FFFF as two halves.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _TWO_HALVES.sub(lambda found: found[1] + json.loads(f'"{found[2]}"'), text.replace("\t", " "))


def _contains_itself(data: Any, around: frozenset[int] = frozenset(), done: set[int] | None = None) -> bool:
    """Tell whether an alias refers to a value that it is in.

    Args:
        data: The value.
        around: Ids of the values that it is in.
        done: Ids of values that are known not to; each is looked at once, however many aliases refer to it.
    """
    done = set() if done is None else done
    if not isinstance(data, dict | list) or id(data) in done:
        return False
    inside = around | {id(data)}
    below = data.values() if isinstance(data, dict) else data
    if id(data) in around or any(_contains_itself(each, inside, done) for each in below):
        return True
    done.add(id(data))
    return False


def _key_text(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _child_node(node: yaml.Node, step: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        found: yaml.Node = node.value[step]
        return found
    return None
