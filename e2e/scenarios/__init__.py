"""The promises to a user, seen on real pods.

One file per promise of the design's failure table or of the container contract; the cluster itself is e2e.cluster's.
Belongs here: anything that units and a lone API server cannot show. Does not: benchmarks.
"""
