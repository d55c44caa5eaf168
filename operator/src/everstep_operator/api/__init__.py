"""The API: one pydantic model per custom resource, and everything that follows from it (CRDs, reference pages, errors).

Belongs here: fields, defaults, limits, rules, reasons. A field is written once, and its CEL rule beside its Python twin.
Does not belong here: anything that talks to a cluster or decides what to do next. This package imports no other of the project.
"""
