"""The modes of the model that a script gave, and of what stands for its modules in a stage.

Modules that are in one stage as a whole are the model's own, so `model.eval()` reaches them. The code that a cut opens
follows the flag of a stand-in. So a script that sets the mode of its model sets that of the stand-ins, and a loss that
reads `model.training` reads the mode of the pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch import nn

from everstep.pipeline.frontend.skeleton import Drawing, Skeleton


class ModelModes:
    """The modules of a model whose code a cut may open, with their stand-ins in one process's part.

    Args:
        model: The model, to which nothing here refers.
        paths: Of these modules.
        part: What stands for the model in this process.
    """

    def __init__(self, model: nn.Module, paths: Collection[str], part: nn.Module) -> None:
        self._pairs: list[tuple[weakref.ref[nn.Module], Skeleton]] = []
        for path, each in part.named_modules():
            if isinstance(each, Skeleton) and (not path or path in paths):
                self._pairs.append((weakref.ref(model.get_submodule(path)), each))
        self._known = [each.training for _, each in self._pairs]

    def adopt(self) -> None:
        """Give the stand-ins the modes that a script has set in the model since."""
        for place, (original, stand_in) in enumerate(self._pairs):
            module = original()
            if module is not None and module.training != self._known[place]:
                self._known[place] = stand_in.training = module.training
                for child in stand_in.children():
                    if isinstance(child, Drawing):
                        child.training = module.training

    def spread(self) -> None:
        """Give the model the modes that a script has set in the pipeline."""
        for place, (original, stand_in) in enumerate(self._pairs):
            module = original()
            if module is not None:
                module.training = self._known[place] = stand_in.training
