"""All that processes of tests import, now or when they first need it: once, in the server that starts them.

Eight ranks that each import torch take half a minute. An optimizer imports torch's compiler when it is first made, and
the first size that is a symbol imports half of sympy.
"""

import gc
import importlib
import importlib.util

_ALWAYS = ("pytest", "xxhash", "tests.checkpoint.processes")
_WITH_TORCH = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "sympy.tensor.tensor",
    "pydantic.dataclasses",
    "pydantic.type_adapter",
    "everstep.checkpoint.session.checkpointer",
    "everstep.pipeline.session",
    "everstep.checkpoint.restore.node_cache",
    "tests.checkpoint.ranks",
)

gc.disable()
for _name in _ALWAYS + (_WITH_TORCH if importlib.util.find_spec("torch") else ()):
    importlib.import_module(_name)
# Children would search it for garbage, and by that copy its pages.
gc.freeze()
gc.enable()
