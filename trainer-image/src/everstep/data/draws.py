"""A generator of its own for a DataLoader, which otherwise draws a number from the generator that training draws from.

torch's DataLoader draws the seed of its workers, which it does without workers too, whenever an iteration begins. A
resumed run begins one iteration more than the run that was never killed: with a draw from the default generator, all
later numbers (of dropout, of augmentation) would be others.
"""

from __future__ import annotations

import hashlib
import sys
from types import FrameType
from typing import Any


def give_generator(caller: FrameType | None, *place: int) -> None:
    """Give the DataLoader that begins an iteration a generator, unless it was made with one.

    A loader asks its sampler for an iterator right before it draws, and there is no call of ours between the two, nor
    one that tells a sampler of its loader: so it is found in the frame that asked. Nothing is drawn or imported here.

    Args:
        caller: The frame that asked the sampler for an iterator: of a DataLoader, or of anybody.
        place: What the seed of the workers follows from, besides the seed that the script gave torch.
    """
    loaders = sys.modules.get("torch.utils.data")
    if caller is None or loaders is None:
        return
    loader: Any = caller.f_locals.get("loader")
    if isinstance(loader, loaders.DataLoader) and loader.generator is None:
        torch = sys.modules["torch"]
        seed = hashlib.sha256(repr((torch.initial_seed(), *place)).encode()).digest()[:8]
        loader.generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
