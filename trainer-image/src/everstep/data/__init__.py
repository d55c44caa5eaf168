"""The order of training data, which survives restarts at any number of ranks.

Here belongs which sample comes when; no reading of data. Needs NumPy; torch only where ranks are asked for.
"""

from everstep.data.sampler import Sampler

__all__ = ["Sampler"]
