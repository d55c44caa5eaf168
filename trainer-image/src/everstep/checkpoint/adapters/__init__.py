"""Frameworks that save in their own way, each in a module that is imported only by who uses the framework.

What they write is published whole, as a folder, under the same manifest, checks and retention as everything else.
"""
