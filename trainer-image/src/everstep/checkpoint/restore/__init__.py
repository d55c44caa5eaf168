"""A restore by all ranks together: proposals, consensus, verified reads, and bytes put into objects of any sharding.

`restorer` is the way in. It changes neither a store nor a slot, and knows nothing of saves.
"""
