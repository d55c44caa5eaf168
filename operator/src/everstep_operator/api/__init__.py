"""The API: one pydantic model per custom resource, and what follows from it: CRDs, reference pages, error messages.

Belongs here: fields, defaults, limits, rules, reasons. A field is written once, its CEL rule beside its Python twin.
Does not belong here: what talks to a cluster or decides what to do next. This package imports no other of ours.
"""
