"""Describe a model and a loss in words that are the same on all ranks that have the same ones.

Parameters of the same shapes say nothing of what is computed with them: an activation, a `dropout.p`, an `eps` or a
loss may be another on another node, and each stage would train by its own. What ranks may well have of their own is
left out, as the number of a device, or an attribute that no forward reads (a rank, the path of a log).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import numbers
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_EVERY_MODULE = frozenset(vars(nn.Module())) | frozenset(vars(nn.Module))
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")
_MANY, _DEEP = 10_000, 8  # elements of a container, and containers in one another, that are described


def describe_model(model: nn.Module) -> dict[str, str]:
    """Describe what the modules of a model are, and the plain attributes that their `forward` reads.

    Args:
        model: The model, or a loss that is a module.

    Returns:
        Descriptions by what they are of, such as `module '1.act'`; in the order of the modules.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        where = _name_module(path)
        found[where] = _describe_class(type(module))
        for name, text in _describe_attributes(module, ("forward",)):
            found[name_attribute(name, path)] = text
        for name, buffer in module.named_buffers(recurse=False):
            found[name_buffer(name, path)] = f"{tuple(buffer.shape)} of {buffer.dtype}"
    return found


def name_attribute(name: str, path: str) -> str:
    """Return the words for an attribute of the module with this path."""
    return f"attribute {name!r} of {_name_module(path)}"


def name_buffer(name: str, path: str) -> str:
    """Return the words for a buffer of the module with this path."""
    return f"buffer {name!r} of {_name_module(path)}"


def _name_module(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def describe_callable(function: Any) -> str:
    """Describe a function, a partial function, a method, or an object that is called.

    Args:
        function: What is called.

    Returns:
        The module and the qualified name, with a digest of the code of what Python wrote, given arguments, and the
        attributes of an object that its `__call__` or `forward` reads. No values of closures and no tensors' contents.
    """
    if isinstance(function, functools.partial):
        given = [_describe(each) for each in function.args]
        given += [f"{name}={_describe(each)}" for name, each in sorted(function.keywords.items())]
        return f"partial({', '.join([describe_callable(function.func), *given])})"
    if isinstance(function, types.MethodType):
        return f"{describe_callable(function.__func__)} of {describe_callable(function.__self__)}"
    if isinstance(function, nn.Module):
        described = list(describe_model(function).items())
        inner = ", ".join(f"{where}: {text}" for where, text in described[1:])
        return described[0][1] + (f" ({inner})" if inner else "")
    if isinstance(function, type):
        return _describe_class(function)
    name = getattr(function, "__qualname__", None)
    if name is None:
        attributes = _describe_attributes(function, ("__call__", "forward"))
        inner = ", ".join(f"{attribute}: {text}" for attribute, text in attributes)
        return _describe_class(type(function)) + (f" ({inner})" if inner else "")
    return _describe_function(function)


def _describe_class(kind: type) -> str:
    text = _name(kind)
    if kind.__module__.partition(".")[0] == "torch":
        return text
    code = [_describe_code(each) for each in _list_code(None, kind, ("forward", "__call__"))]
    return text + (f" (code {_digest(''.join(code))})" if code else "")


def _describe_attributes(thing: Any, methods: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the plain attributes of an object that these methods read, or others that they call, with their names."""
    held = getattr(thing, "__dict__", {})
    read = {name for code in _list_code(thing, type(thing), methods) for name in _list_names(code)}
    for name in sorted(read & held.keys()):
        if name not in _EVERY_MODULE and (text := _describe(held[name])):
            yield name, text


def _list_code(thing: Any, kind: type, methods: tuple[str, ...]) -> list[types.CodeType]:
    """Return the code of these methods, and of methods of the same object that it names; none of nn.Module's own."""
    found: dict[str, list[types.CodeType]] = {}
    wanted = list(methods)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        places = [vars(each).get(name) for each in kind.__mro__ if each not in (object, nn.Module)]
        places.append(getattr(thing, "__dict__", {}).get(name) if thing is not None else None)
        codes = [_code_of(each) for each in places]
        found[name] = [code for code in codes if code is not None]
        wanted.extend(other for code in found[name] for other in _list_names(code) if not other.startswith("__"))
    return [code for name in sorted(found) for code in found[name]]


def _code_of(thing: Any) -> types.CodeType | None:
    if isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, staticmethod | classmethod | types.MethodType):
        thing = thing.__func__
    code = getattr(inspect.unwrap(thing), "__code__", None) if isinstance(thing, types.FunctionType) else None
    return code if isinstance(code, types.CodeType) else None


def _list_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _list_names(each)


def _describe_code(code: types.CodeType) -> str:
    """Describe what code does, not where it stands."""
    constants = [
        _describe_code(each) if isinstance(each, types.CodeType) else _describe(each) for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _describe(value: Any, deep: int = 0) -> str:
    """Describe a plain value, a container of them, something that is called, or a tensor; empty for all else."""
    if deep > _DEEP or isinstance(value, torch.device):
        return ""
    if isinstance(value, str) and (device := _DEVICE.fullmatch(value)):
        return device[1]  # its number is another on each process
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type(None) | numbers.Number | str | bytes | torch.dtype | types.EllipsisType):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, slice):
        return f"slice({_describe([value.start, value.stop, value.step])})"
    if isinstance(value, list | tuple | set | frozenset | Mapping) and len(value) > _MANY:
        return f"{len(value)} elements"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(each, deep + 1) for each in value)}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_describe(each, deep + 1) for each in value))}}}"
    if isinstance(value, Mapping):
        items = sorted(f"{_describe(key, deep + 1)}: {_describe(each, deep + 1)}" for key, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, nn.Module):
        return _describe_class(type(value))
    if isinstance(value, functools.partial):
        return f"partial({_describe([value.func, value.args, value.keywords], deep + 1)})"
    if isinstance(value, types.MethodType):  # not whose it is: that may hold it
        return _describe(value.__func__, deep + 1)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return _describe_function(value, deep + 1)
    return ""


def _describe_function(function: Any, deep: int = 0) -> str:
    text = _name(function)
    if isinstance(code := getattr(function, "__code__", None), types.CodeType):
        defaults = _describe([function.__defaults__, function.__kwdefaults__], deep)
        text += f" (code {_digest(_describe_code(code) + defaults)})"
    return text


def _name(thing: Any) -> str:
    module = str(getattr(thing, "__module__", None)).replace("__mp_main__", "__main__")  # of a process that was spawned
    return f"{module}.{thing.__qualname__}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
