"""`everstep.load` and `everstep.load_into`: a checkpoint read beside any run, without a claim or a writer.

`api` is the way in. What all ranks of a run restore together belongs to `restore`.
"""
