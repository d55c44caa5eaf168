"""`smp.optimizers`: those of apex, which are not offered."""

from __future__ import annotations

from everstep.compat.smdistributed.modelparallel.torch.refused import Refused

FusedNovoGrad = Refused("optimizers.FusedNovoGrad")
FusedLamb = Refused("optimizers.FusedLamb")
