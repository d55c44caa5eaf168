"""Plain values as tagged JSON: what is packed is unpacked with the same type and the same bits, without pickle.

None, bool, str, ints that a double holds and finite floats are themselves, a list is a list; everything else is an
object with one key, its tag. So an unknown tag is refused, never taken for a dictionary of the user.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.checkpoint.errors import CheckpointError

# Greater ones would be rounded by readers whose numbers are doubles.
_EXACT = 2**53

# Bool, integers, floats, complex, dates, bytes and text of a fixed width: their bytes are the whole value.
_PLAIN_KINDS = "biufcmMSUV"

_PAIRS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
# What a defaultdict makes; any other is the script's own, which it has again when it restores.
_FACTORIES: dict[str, type] = {each.__name__: each for each in (int, float, bool, str, list, dict, set)}
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


LARGEST_VALUE = 64 << 20  # bytes of one value in a manifest, which every rank reads


@dataclass(frozen=True)
class InPart:
    """The type whose bytes are the tensor of the same name: `kind` is numpy.ndarray, bytes or bytearray.

    `order`: C, or F for an array whose bytes are those of its transpose.
    """

    kind: str
    dtype: Any = None  # as describe_array() has it
    shape: tuple[int, ...] = ()
    order: str = "C"

    def restore(self, data: Any) -> Any:
        """Return the value of a NumPy array of its bytes, which becomes its memory if it is an array."""
        if self.kind != "numpy.ndarray":
            return (bytes if self.kind == "bytes" else bytearray)(data.data)
        found = data.view(_to_dtype(self.dtype))
        return found.reshape(self.shape[::-1]).T if self.order == "F" else found.reshape(self.shape)


class UnsupportedValue(CheckpointError):
    """The value at `path` cannot be saved, or not be restored, without pickle."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'the value'}: {why}")
        self.path = path


def pack_value(value: Any, path: str = "", *, allow_pickle: bool = False) -> object:
    """Return what json can write for `value`.

    Args:
        value: A value of a type that has a tag, or of one that json knows.
        path: Names the value in messages.
        allow_pickle: Pickle a value of a type without a tag.

    Raises:
        UnsupportedValue: The type has no tag.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < _EXACT else {"int": f"{value:x}"}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is list:
        if _is_itself(value):
            return list(value)
        return [pack_value(each, f"{path}[{i}]", allow_pickle=allow_pickle) for i, each in enumerate(value)]
    return _encode_tagged(value, path, allow_pickle)


def check_size(packed: object, name: str) -> None:
    """Refuse a value that would make the manifest, which every rank reads, too large.

    Raises:
        UnsupportedValue: It takes more than LARGEST_VALUE bytes.
    """
    if isinstance(packed, list | dict) or (isinstance(packed, str) and len(packed) > LARGEST_VALUE):
        size = _rough_size(packed)
        if size > LARGEST_VALUE:
            raise UnsupportedValue(
                name,
                f"takes about {size >> 20} MiB as a plain value, and at most {LARGEST_VALUE >> 20} MiB may: keep it as "
                "a NumPy array or a tensor, which are saved as bytes, or save less of it",
            )


def _rough_size(packed: object) -> int:
    """Return about how many bytes a packed value has as JSON."""
    if isinstance(packed, str):
        return len(packed) + 3
    if isinstance(packed, list):
        first = type(packed[0]) if packed else None
        if first in (int, float, bool, type(None)) and len(packed) > 100:
            return 8 * len(packed)  # numbers, most likely: to look at each would take longer than to write them
        return 2 + sum(map(_rough_size, packed))
    if isinstance(packed, dict):
        return 2 + sum(len(key) + 4 + _rough_size(value) for key, value in packed.items())
    return 8


def unpack_value(packed: Any, path: str = "", *, allow_pickle: bool = False) -> Any:
    """Return the value that pack_value() was given.

    Raises:
        UnsupportedValue: A tag is unknown or damaged, or a pickle is not allowed.
    """
    if packed is None or isinstance(packed, bool | str | int | float):
        return packed
    if isinstance(packed, list):
        return [unpack_value(each, f"{path}[{i}]", allow_pickle=allow_pickle) for i, each in enumerate(packed)]
    if not (isinstance(packed, dict) and len(packed) == 1):
        raise UnsupportedValue(path, "is not a packed value: an object has exactly one key, its tag")
    ((tag, content),) = packed.items()
    if tag == "pickle" and not allow_pickle:
        raise UnsupportedValue(
            path, "was saved with allow_pickle=True and can only be restored so, from a store that you trust"
        )
    try:
        return _decode_tagged(tag, content, path, allow_pickle)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, struct.error) as error:
        raise UnsupportedValue(path, f"what is tagged {tag!r} cannot be read: {error}") from error


def _encode_tagged(value: Any, path: str, allow_pickle: bool) -> object:
    name = type(value).__name__

    def inner(each: Any, where: str) -> object:
        return pack_value(each, f"{path}[{where}]", allow_pickle=allow_pickle)

    def pairs() -> list[list[object]]:
        keys = [inner(key, f"key {key!r}") for key in value]  # first: a value may be refused because of another's key
        return [[key, inner(each, repr(own))] for key, (own, each) in zip(keys, value.items(), strict=True)]

    if type(value) in (dict, OrderedDict, Counter):
        return {name: pairs()}
    if type(value) is defaultdict:
        made = next((each for each, kind in _FACTORIES.items() if kind is value.default_factory), None)
        return {name: [made, pairs()]}
    if type(value) is tuple:
        if _is_itself(value):
            return {name: list(value)}
        return {name: [inner(each, str(i)) for i, each in enumerate(value)]}
    if type(value) in (set, frozenset):
        # Sorted, so that equal sets of two ranks are equal bytes.
        return {name: sorted((inner(each, repr(each)) for each in value), key=json.dumps)}
    if type(value) in (bytes, bytearray):
        return {name: _encode_base64(value)}
    if type(value) is complex:
        return {name: struct.pack(">dd", value.real, value.imag).hex()}
    if type(value) is InPart:
        return {"part": {"kind": value.kind, "dtype": value.dtype, "shape": list(value.shape), "order": value.order}}
    known = _of_numpy(value) or _of_torch(value)
    if known:
        return known
    if _holds_parameters(value):
        # Pickled, it would come back with parameters of its own, and train nothing.
        raise UnsupportedValue(
            path,
            f"{_name_kind(value)} cannot be saved inside of another value: give each a name of its own, as "
            "restore(…, optimizer_a=…, optimizer_b=…)",
        )
    if allow_pickle:
        return {"pickle": _encode_base64(_pickle(value, path))}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        raise UnsupportedValue(
            path,
            "a tensor cannot be saved inside of what is saved as one value: hold it in dictionaries whose keys are "
            "plain values (text, numbers, tuples of them …), lists and tuples, or pass "
            "StorageOptions(allow_pickle=True)",
        )
    kind = _name_kind(value)
    raise UnsupportedValue(
        path,
        f"{kind} cannot be saved without pickle; save {_find_instead(value)}, or pass "
        "StorageOptions(allow_pickle=True)",
    )


def _holds_parameters(value: Any) -> bool:
    """Tell whether a value is an optimizer of torch, or what changes one: a scheduler."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(
        value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau
    )


def _find_instead(value: Any) -> str:
    """Return what can be saved in place of a value that is refused."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "it under a name of its own, as restore(…, name=…)"
    if _is_of_numpy(value):
        return "numpy.array(…, its plain dtype)"
    if isinstance(value, type):
        return "its name"
    for name, call in (
        ("state_dict", "state_dict()"),
        ("bit_generator", "bit_generator.state"),
        ("get_state", "get_state()"),
    ):
        if hasattr(value, name):
            return (
                f"an object of your own whose state_dict() returns {{'state': its {call}}} and whose load_state_dict() "
                f"gives it that again (what {call} is now would be saved for ever)"
            )
    return "plain values that make it again (numbers, text, lists and dictionaries of them)"


def _decode_tagged(tag: str, content: Any, path: str, allow_pickle: bool) -> Any:
    def inner(each: Any) -> Any:
        return unpack_value(each, f"{path}.{tag}", allow_pickle=allow_pickle)

    if tag in _PAIRS:
        return _PAIRS[tag]([(inner(key), inner(value)) for key, value in content])
    if tag in _ITEMS:
        return _ITEMS[tag]([inner(each) for each in content])
    match tag:
        case "int":
            return int(content, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(content)))
        case "defaultdict":
            factory, pairs = content
            return defaultdict(_FACTORIES.get(factory), [(inner(key), inner(value)) for key, value in pairs])
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "bytearray":
            return bytearray(base64.b64decode(content, validate=True))
        case "numpy.ndarray" | "numpy.scalar":
            return _to_numpy(tag, content)
        case "part":
            return InPart(content["kind"], content["dtype"], tuple(content["shape"]), content["order"])
        case "torch.dtype" | "torch.device" | "torch.Size":
            return _to_torch(tag, content)
        case "pickle":
            return pickle.loads(base64.b64decode(content, validate=True))  # noqa: S301 (the caller has allowed it)
    raise UnsupportedValue(path, f"the format knows no values that are tagged {tag!r}")


def _is_itself(items: Sequence[Any]) -> bool:
    """Tell whether all are integers that a double holds: a generator's state is 600 of them."""
    return set(map(type, items)) == {int} and min(items) > -_EXACT and max(items) < _EXACT


def _encode_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _of_numpy(value: Any) -> dict[str, object] | None:
    # Nobody holds an array of a library that is not loaded; so packing costs no import.
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    if not is_plain_array(value):
        return None
    tag = "numpy.ndarray" if type(value) is numpy.ndarray else "numpy.scalar"
    return {
        tag: {"dtype": _from_dtype(value.dtype), "shape": list(value.shape), "data": _encode_base64(value.tobytes())}
    }


def _to_numpy(tag: str, content: dict[str, Any]) -> Any:
    import numpy

    dtype, data = _to_dtype(content["dtype"]), base64.b64decode(content["data"], validate=True)
    if tag == "numpy.scalar" and dtype.kind in "SU":
        data = data[: dtype.itemsize]  # NumPy says that an empty text has the bytes of one character
    if tag == "numpy.scalar" and dtype.kind == "S":
        return numpy.bytes_(data)  # as an element of an array it would lose the zeros at its end
    if tag == "numpy.scalar" and dtype.kind == "U":
        order = "be" if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big") else "le"
        return numpy.str_(data.decode(f"utf-32-{order}", "surrogatepass"))
    if dtype.itemsize == 0:
        array = numpy.zeros(content["shape"], dtype)
    else:  # a copy, because an array over bytes could not be written to
        array = numpy.frombuffer(data, dtype).reshape(content["shape"]).copy()
    return array if tag == "numpy.ndarray" else array[()]


def is_plain_array(value: Any) -> bool:
    """Tell whether the bytes of an array or a scalar of NumPy, with its dtype, are the whole value.

    Those of Python objects are not, nor those of a class that a dtype's text does not name: numpy.record, or another
    that is derived from a scalar.
    """
    import numpy

    is_own_kind = isinstance(value, numpy.generic) and type(value) is not value.dtype.type
    return not is_own_kind and value.dtype.kind in _PLAIN_KINDS and not value.dtype.hasobject and _is_plain(value.dtype)


def _is_plain(dtype: Any) -> bool:
    """Tell whether a structured dtype makes plain scalars, also of the fields within."""
    import numpy

    if dtype.names is None:
        return dtype.subdtype is None or _is_plain(dtype.base)
    return dtype.type is numpy.void and all(_is_plain(inner) for inner, *_ in dtype.fields.values())


def _is_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _pickle(value: Any, path: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # of the value's own code too
        reason = " ".join(str(error).split())
        raise UnsupportedValue(path, f"{_name_kind(value)} cannot be pickled: {reason}") from error


def _name_kind(value: Any) -> str:
    """Return what a value that is refused is called."""
    numpy = sys.modules.get("numpy")
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if numpy is None or not isinstance(value, numpy.ndarray):
        return f"a {name}"
    if type(value) is not numpy.ndarray:
        return f"a {name}, which is more than an array,"
    if value.dtype.hasobject:
        return "an array of Python objects"
    return f"an array of {'numpy.record' if value.dtype.names is not None else value.dtype}"


def describe_array(value: Any) -> InPart:
    """Return what a plain array is, so that its bytes make it again."""
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return InPart("numpy.ndarray", _from_dtype(value.dtype), tuple(value.shape), order)


def _from_dtype(dtype: Any) -> Any:
    """Return the dtype as NumPy's own files have it: a text, or for records a list of fields."""
    if dtype.names is None:
        return dtype.str
    import numpy

    return json.loads(json.dumps(numpy.lib.format.dtype_to_descr(dtype)))


def _to_dtype(described: Any) -> Any:
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(_decode_fields(described))
    if dtype.kind not in _PLAIN_KINDS or dtype.hasobject:
        raise ValueError(f"no plain dtype: {dtype}")
    return dtype


def _decode_fields(described: Any) -> Any:
    """JSON knows no tuples, of which NumPy wants a field to be one."""
    if isinstance(described, str):
        return described
    found = []
    for name, inner, *shape in described:
        found.append((tuple(name) if isinstance(name, list) else name, _decode_fields(inner), *map(tuple, shape)))
    return found


def _of_torch(value: Any) -> dict[str, object] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"torch.device": str(value)}
    if isinstance(value, torch.Size):
        return {"torch.Size": list(value)}
    return None


def _to_torch(tag: str, content: Any) -> Any:
    import torch

    match tag:
        case "torch.dtype":
            found = getattr(torch, content)
            if not isinstance(found, torch.dtype):
                raise ValueError(f"no dtype of torch: {content}")
            return found
        case "torch.device":
            return torch.device(content)
    return torch.Size(content)
