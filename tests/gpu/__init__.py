"""State on real GPUs: `make test-gpu`. Needs pytest beside what `everstep[trainer]` needs, no other test's helpers."""
